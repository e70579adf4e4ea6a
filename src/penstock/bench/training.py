"""Training steps, timed: our side of the train benchmark, and the ceilings.

`train_steps` is the loop as users run it. `same_batch_steps` is the same loop with a loader that hands out one batch
over and over: what is between the two is the cost of loading. `matmul_rate` is the best that the device's matrix units
do on one large product, which no training step can pass.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.bench.step_clock import StepClock
from penstock.runlog import Record, RunLog, latest_by_step, read_records
from penstock.store import open_store
from penstock.train import load_config

__all__ = ["WARM_UP_STEPS", "matmul_rate", "same_batch_steps", "train_steps"]

WARM_UP_STEPS = 3
MATMUL_SECONDS = 2.0


def train_steps(*, store: str, overrides: Sequence[str], warm_up_steps: int = WARM_UP_STEPS) -> dict[str, Any]:
    """`penstock.train.train` for some steps, without evaluations and saves on the way."""
    from penstock.train import train

    config = load_config(None, overrides)
    clock = StepClock(
        num_steps=config.stop_after_steps or config.num_steps,
        warm_up_steps=warm_up_steps,
        tokens_per_step=config.batch_rows * config.seq_len,
    )

    def on_progress(record: Record) -> None:
        if record["kind"] == "step":
            clock.step_done(is_finished=True)  # its loss is known

    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        with open_store(store) as opened, RunLog(Path(folder)) as log:
            result = train(config, opened, Path(folder), log, on_progress=on_progress)
            flops = _flops_per_token(overrides, vocab_size=opened.tokenizer().vocab_size)
        records = read_records(Path(folder))
    steps = latest_by_step(records, "step")[warm_up_steps:]
    seconds = sum(step["seconds"] for step in steps)
    choices = {one["name"]: one["value"] for one in records if one["kind"] == "choice"}
    return clock.report(
        flops_per_token=flops,
        data_share_percent=100 * sum(step["data_seconds"] for step in steps) / seconds,
        targets_per_step=sum(step["tokens"] for step in steps) / len(steps),
        final_loss=steps[-1]["loss"],
        parameters=result.parameters,
        choices={name: choices[name] for name in sorted(choices) if name in REPORTED_CHOICES},
    )


REPORTED_CHOICES = frozenset(
    {
        "activation_checkpointing",
        "attention",
        "compile",
        "dtype",
        "loss_kernel",
        "micro_batch_rows",
        "optimizer",
    }
)


def _flops_per_token(overrides: Sequence[str], *, vocab_size: int) -> float | None:
    """Of the built-in decoder; a pretrained model with adapters has no agreed count."""
    from penstock.train.model import flops_per_token

    config = load_config(None, overrides)
    if config.model.pretrained is not None:
        return None
    return flops_per_token(config.model.shape(vocab_size=vocab_size, seq_len=config.seq_len), config.seq_len)


def same_batch_steps(*, store: str, overrides: Sequence[str], warm_up_steps: int = WARM_UP_STEPS) -> dict[str, Any]:
    """The steps of the loop without its data loading."""
    import penstock.train.run as run_module
    from penstock.load.torch import TorchBatch, TorchLoader

    class OneBatch(TorchLoader):
        """Hands out its first batch for ever."""

        kept: TorchBatch | None = None

        def __next__(self) -> TorchBatch:
            if self.kept is None:
                self.kept = super().__next__()
            return self.kept

    vars(run_module)["TorchLoader"] = OneBatch  # this process does nothing else
    return train_steps(store=store, overrides=overrides, warm_up_steps=warm_up_steps)


def matmul_rate(*, size: int | None = None) -> dict[str, Any]:
    """TFLOP/s of one square product, bf16 on a GPU and float32 on a CPU, the best of several stretches."""
    import torch

    has_gpu = torch.cuda.is_available()
    side = size or (8192 if has_gpu else 1024)
    device, dtype = ("cuda", torch.bfloat16) if has_gpu else ("cpu", torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    best, stop = 0.0, time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < stop:
        if has_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(PRODUCTS_PER_STRETCH):
            torch.mm(left, right, out=out)
        if has_gpu:
            torch.cuda.synchronize()
        best = max(best, PRODUCTS_PER_STRETCH * 2 * side**3 / (time.perf_counter() - started))
    return {"teraflops": best / 1e12, "side": side}


PRODUCTS_PER_STRETCH = 10
