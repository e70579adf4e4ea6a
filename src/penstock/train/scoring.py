"""A trained model scored on rows of one's choosing, after its run.

In: a run's newest whole checkpoint and a plan over held-out documents. Out: its `Evaluation` there, the same arithmetic
as during training. The model is computed in float32, or as the run did where this machine has its device. Cost: one
forward pass over the rows; the logits of a few rows are in memory at a time.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import InputError
from penstock.load.torch import sequential_batches
from penstock.pack import Plan
from penstock.train.building import model_of_checkpoint
from penstock.train.checkpoint import find_latest
from penstock.train.evaluate import Evaluation, evaluate
from penstock.train.loss import Autocast

__all__ = ["ScoredModel", "open_model"]

LOGITS_LIMIT_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """A model out of a checkpoint, ready to be scored."""

    model: Any
    step: int
    device: str
    autocast: Autocast

    @property
    def max_positions(self) -> int:
        """The longest row it takes."""
        positions: int = self.model.max_positions
        return positions

    def score(self, plan: Plan, *, document_boundaries: bool) -> Evaluation | None:
        """Scores every row of the plan; None if no target with bytes is among them."""
        lengths = torch.from_numpy(plan.store.tokenizer().estimated_byte_lengths()).to(self.device)
        row_bytes = plan.seq_len * self.model.padded_vocab_size * 4
        rows = max(1, LOGITS_LIMIT_BYTES // row_bytes)
        return evaluate(
            self.model,
            sequential_batches(plan, batch_rows=rows, device=self.device),
            lengths,
            document_boundaries=document_boundaries,
            autocast=self.autocast,
        )


def open_model(run_folder: Path) -> ScoredModel:
    """The model of a run's newest whole checkpoint.

    Raises:
        InputError: there is none.
        ResumeError: none is whole.
    """
    checkpoint = find_latest(run_folder)
    if checkpoint is None:
        raise InputError(
            f"{run_folder} holds no checkpoint", hint="its checkpoints were removed; train it again, or restore them"
        )
    from penstock.train.choices import Choices, autocast_of

    model = model_of_checkpoint(checkpoint)
    has_gpu = torch.cuda.is_available()
    choices = Choices(**checkpoint.state["choices"])
    autocast = autocast_of(choices) if choices.device == "cpu" or has_gpu else nullcontext
    device = "cuda" if choices.device.startswith("cuda") and has_gpu else "cpu"
    return ScoredModel(model=model.to(device).eval(), step=checkpoint.step, device=device, autocast=autocast)
