"""A store in Lightning: the data module keeps the stream's place in the checkpoint.

penstock prepare stdlib: --out store
python examples/lightning_trainer.py store run
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import penstock
from penstock.load.torch import IGNORED_LABEL, RowStream

SEQ_LEN, BATCH_ROWS, WIDTH = 128, 8, 64


class Rows(lightning.LightningDataModule):
    """The stream, and its place in every checkpoint."""

    def __init__(self, plan: penstock.Plan) -> None:
        super().__init__()
        self._stream = RowStream(plan, batch_rows=BATCH_ROWS, batched=True, seed=1)
        self._start = 0  # the step at which this process began

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Batches as the stream makes them."""
        return DataLoader(self._stream, batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        """The place after the steps trained so far."""
        return {"stream": self._stream.state_after(self.trainer.global_step - self._start)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self._stream.load_state_dict(state_dict["stream"])
        self._start = self._stream.position // BATCH_ROWS


class Bigram(lightning.LightningModule):
    """The smallest language model."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
        """Cross-entropy over the labels that count."""
        logits = self._layers(batch["input_ids"])  # [B, T, vocabulary]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(path: str, out: str, steps: int = 6) -> dict[int, float]:
    """Trains up to a step, from `out`/last.ckpt on where it is there; returns the loss of each step."""
    lightning.seed_everything(0, verbose=False)
    checkpoint = Path(out) / "last.ckpt"
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        model = Bigram(store.manifest.tokenizer["vocab_size"])
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=Rows(plan), ckpt_path=str(checkpoint) if checkpoint.exists() else None)
        trainer.save_checkpoint(checkpoint)
    return model.losses


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2]))
