"""`bin`: the tokens of a split end to end, as nanoGPT reads them with `np.memmap`.

    DIR/train.bin   DIR/val.bin   DIR/meta.json

Little-endian uint16, uint32 for vocabularies above 65,536; `meta.json` says which (nanoGPT's own meta is a pickle,
which penstock doesn't write). Where not every token carries loss, `train_loss_mask.bin` has one byte per token. A split
without tokens has no file: an empty file can't be mapped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.export.folder import ExportFolder
from penstock.export.split import SplitJob

__all__ = ["write_split", "write_summary"]


def write_split(job: SplitJob) -> dict[str, Any]:
    """Writes `NAME.bin` and, where needed, its mask."""
    stream = job.stream
    facts: dict[str, Any] = {"dtype": stream.dtype.newbyteorder("=").name, "file": None, "loss_mask": None}
    if not stream.num_tokens:
        return facts
    facts["file"] = f"{job.split}.bin"
    with job.folder.file(facts["file"]) as file:
        for begin, end in stream.stretches():
            file.write(stream.tokens(begin, end))
            job.advance(end - begin)
    if stream.has_loss_runs:
        facts["loss_mask"] = f"{job.split}_loss_mask.bin"
        with job.folder.file(facts["loss_mask"]) as file:
            for begin, end in stream.stretches():
                file.write(stream.carries_loss(begin, end).view(np.uint8))
    return facts


def write_summary(folder: ExportFolder, splits: dict[str, dict[str, Any]], tokenizer: dict[str, Any]) -> None:
    """Writes `meta.json`."""
    folder.write_json("meta.json", {**tokenizer, "splits": splits})
