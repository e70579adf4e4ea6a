"""A store in PyTorch's own DataLoader, with worker processes: the same batches for any number of them, exact resume.

penstock prepare stdlib: --out store
python examples/data_loader.py store
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from torch.utils.data import DataLoader

import penstock
from penstock.load.torch import RowStream

SEQ_LEN, BATCH_ROWS, STEPS = 128, 8, 6


def main(path: str, num_workers: int = 0, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Reads a few batches, from a saved state on where there is one; returns their inputs and the state after them."""
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        stream = RowStream(plan, batch_rows=BATCH_ROWS, batched=True, seed=1)
        if state:
            stream.load_state_dict(state)
        batches = DataLoader(stream, batch_size=None, num_workers=num_workers)
        seen = [batch["input_ids"].tolist() for batch in itertools.islice(batches, STEPS)]
        state = stream.state_after(STEPS)
    print(f"{len(seen)} batches of {BATCH_ROWS} x {SEQ_LEN}; to go on from here: {state}")
    return seen, state


if __name__ == "__main__":
    main(sys.argv[1])
