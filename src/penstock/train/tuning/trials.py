"""One candidate, tried: forward and backward of a micro-batch on the real model, timed.

In: the model on its device and `Choices`. Out: `Trial`: tokens per second, peak memory, or why it failed. The batch is
made up, with the shape of the run's and documents in it. No trial updates the weights, gradients are cleared, and
`Trials` puts the random generators back at its end: the run starts as if nothing had been tried. A trial ends with the
iteration under way when its seconds are over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from penstock.load.torch import TorchBatch
from penstock.train.choices import Choices, autocast_of
from penstock.train.config import TrainConfig
from penstock.train.language_model import LanguageModel
from penstock.train.loss import nats_of
from penstock.train.randomness import restore_random_state, saved_random_state
from penstock.train.tuning.applying import applied

__all__ = ["Trial", "Trials", "made_up_batch"]

# Few, as in most corpora: the fewer, the more of a row attention has to look at.
DOCUMENTS_PER_ROW = 2
MOST_ITERATIONS = 20
TRIAL_SECONDS = 2.0  # after the first iteration, which may compile


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one candidate; `failure` is empty where it worked."""

    choices: Choices
    tokens_per_second: float = 0.0
    first_seconds: float = 0.0
    peak_bytes: int | None = None
    failure: str = ""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory was what it failed for."""
        return self.failure == "out of memory"


class Trials:
    """Tries candidates on one model."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        self._model = model
        self._config = config

    @contextmanager
    def prepared(self, device: str) -> Iterator[None]:
        """The model on the device in training mode; afterwards as it was, but for the device."""
        random_state, was_training = saved_random_state(), self._model.training
        self._model.to(device).train()
        try:
            yield
        finally:
            self._clear()
            self._model.train(was_training)
            restore_random_state(random_state)

    def __call__(self, choices: Choices) -> Trial:
        """Never raises for want of memory or of a kernel: that is what a trial is to find out."""
        device = torch.device(choices.device)
        batch = made_up_batch(
            rows=choices.micro_batch_rows,
            seq_len=self._config.seq_len,
            vocab_size=self._model.vocab_size,
            device=device,
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            with applied(self._model, choices):
                seconds = self._timed(choices, batch)
        except torch.OutOfMemoryError:
            return Trial(choices=choices, failure="out of memory")
        except RuntimeError as error:  # a kernel that doesn't exist here, a compiler that fails
            return Trial(choices=choices, failure=" ".join(str(error).split())[:200] or type(error).__name__)
        finally:
            self._clear()
        tokens = choices.micro_batch_rows * self._config.seq_len
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Trial(
            choices=choices,
            tokens_per_second=tokens / statistics.median(seconds[1:]),
            first_seconds=seconds[0],
            peak_bytes=peak,
        )

    def _timed(self, choices: Choices, batch: TorchBatch) -> list[float]:
        """Seconds of each iteration; the first one is apart."""
        autocast = autocast_of(choices)
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < MOST_ITERATIONS and sum(seconds[1:]) < TRIAL_SECONDS):
            started = time.perf_counter()
            nats = nats_of(
                self._model,
                batch,
                document_boundaries=self._config.document_boundaries,
                autocast=autocast,
                loss_kernel=choices.loss_kernel,
            )
            (nats / batch.num_targets).backward()  # type: ignore[no-untyped-call]
            if choices.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds

    def _clear(self) -> None:
        self._model.zero_grad(set_to_none=True)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def made_up_batch(*, rows: int, seq_len: int, vocab_size: int, device: torch.device) -> TorchBatch:
    """Rows of a few documents each; the same for the same sizes, and no global generator is touched."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, vocab_size, (rows, seq_len + 1), generator=generator)
    mask = torch.ones(rows, seq_len, dtype=torch.bool)
    size = max(1, seq_len // DOCUMENTS_PER_ROW)
    begins = {row * seq_len + first for row in range(rows) for first in range(0, seq_len, size)}
    borders = np.array([*sorted(begins), rows * seq_len], np.int32)
    return TorchBatch(
        tokens=tokens.to(device),
        loss_mask=mask.to(device),
        cu_seqlens=torch.from_numpy(borders).to(device),
        host_mask=mask.numpy(),
        host_borders=borders,
    )
