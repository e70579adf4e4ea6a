"""Training steps, timed: tasks of the train benchmark.

`train_steps` is the loop as users run it, read from its own record. `same_batch_steps` is its ceiling: the same model,
loss, clipping and update on one batch that is already there, over and over. The first steps warm caches and allocators
and are left out of both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.runlog import RunLog, latest_by_step, read_records
from penstock.store import open_store
from penstock.train import load_config

__all__ = ["same_batch_steps", "train_steps"]

WARM_UP_STEPS = 3


def train_steps(*, store: str, overrides: Sequence[str]) -> dict[str, Any]:
    """`penstock.train.train` for some steps, without evaluations and saves on the way."""
    from penstock.train import train

    config = load_config(None, overrides)
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        with open_store(store) as opened, RunLog(Path(folder)) as log:
            result = train(config, opened, Path(folder), log)
        steps = latest_by_step(read_records(Path(folder)), "step")[WARM_UP_STEPS:]
    seconds = sum(step["seconds"] for step in steps)
    return {
        "tokens_per_second": sum(step["tokens"] for step in steps) / seconds,
        "data_share_percent": 100 * sum(step["data_seconds"] for step in steps) / seconds,
        "steps_timed": len(steps),
        "parameters": result.parameters,
    }


def same_batch_steps(*, store: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The steps of the loop without its data loading."""
    import torch

    from penstock.load.torch import TorchLoader
    from penstock.pack import plan_concat
    from penstock.train import build_model
    from penstock.train.choices import autocast_of, chosen, numeric_settings
    from penstock.train.loss import add_gradients
    from penstock.train.optimizer import build_optimizer, set_learning_rate

    config = load_config(None, overrides)
    with ExitStack() as stack:
        opened = stack.enter_context(open_store(store))
        log = stack.enter_context(RunLog(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-")))))
        shape = config.model.shape(vocab_size=opened.tokenizer().vocab_size, seq_len=config.seq_len)
        choices = chosen(config, shape, log)
        stack.enter_context(numeric_settings(choices, deterministic=config.deterministic))
        model = build_model(shape, seed=config.seed).to(choices.device).train()
        optimizer = build_optimizer(
            model,
            weight_decay=config.weight_decay,
            betas=config.betas,
            eps=config.eps,
            fused=choices.fused_optimizer,
        )
        set_learning_rate(optimizer, config.peak_learning_rate)
        plan = plan_concat(opened, split="train", seq_len=config.seq_len, boundaries=config.document_boundaries)
        with TorchLoader(plan, batch_rows=config.batch_rows, device=choices.device, prefetch_batches=0) as loader:
            batch = next(loader)
        started = time.perf_counter()
        for step in range(config.num_steps):
            if step == WARM_UP_STEPS:
                started = time.perf_counter()
            loss = add_gradients(
                model,
                batch,
                micro_batch_rows=choices.micro_batch_rows,
                document_boundaries=config.document_boundaries,
                autocast=autocast_of(choices),
            )
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
            torch.stack((loss, norm)).tolist()  # the loop reads both each step, which waits for the device
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
    return {"tokens_per_second": (config.num_steps - WARM_UP_STEPS) * batch.num_targets / seconds}
