"""Your own PyTorch loop over a store: batches at any length, exact resume, nothing of penstock's trainer.

penstock prepare stdlib: --out store
python examples/own_model.py store
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import penstock

SEQ_LEN, BATCH_ROWS, STEPS, WIDTH = 128, 8, 20, 64


def main(path: str) -> list[float]:
    """Trains a bigram model for a few steps; returns the losses."""
    torch.manual_seed(0)
    losses = []
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        vocab_size = store.manifest.tokenizer["vocab_size"]
        model = nn.Sequential(nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with penstock.TorchLoader(plan, batch_rows=BATCH_ROWS, seed=1) as loader:
            for _ in range(STEPS):
                batch = next(loader)
                logits = model(batch.inputs)  # [B, T, vocabulary]
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; to go on from here: {loader.state_dict()}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
