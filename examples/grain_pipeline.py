"""A store in Grain: the same stream as every other loader's, saved and restored by Grain itself.

penstock prepare stdlib: --out store
python examples/grain_pipeline.py store
"""

from __future__ import annotations

import sys

import penstock
from penstock.load.grain import grain_pipeline

SEQ_LEN, BATCH_ROWS, STEPS = 128, 8, 4


def main(path: str) -> tuple[list[list[int]], list[list[int]]]:
    """Reads some batches, saves, reads on; then restores and reads the same again. Returns the rows of both."""
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        batches = grain_pipeline(plan, batch_rows=BATCH_ROWS, seed=1, fields=["input_ids", "labels", "row"])
        iterator = iter(batches)
        for _ in range(STEPS):
            next(iterator)
        state = iterator.get_state()
        went_on = [next(iterator)["row"].tolist() for _ in range(STEPS)]
        restored = iter(batches)
        restored.set_state(state)
        again = [next(restored)["row"].tolist() for _ in range(STEPS)]
    print(f"rows after the state: {went_on[0]}; after restoring it: {again[0]}")
    return went_on, again


if __name__ == "__main__":
    main(sys.argv[1])
