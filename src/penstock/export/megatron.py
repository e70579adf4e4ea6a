"""`megatron`: Megatron-Core's indexed data set, `.bin` and `.idx`, one sequence per document.

The layout is that of `megatron/core/datasets/indexed_dataset.py` in NVIDIA/Megatron-LM (`_IndexWriter`, `_IndexReader`,
`DType`), all little-endian:

    9 bytes   MMIDIDX\\0\\0
    u8        1, the version
    u1        code of the token type: 8 uint16, 4 int32, 1 uint8
    u8        number of sequences, S
    u8        number of document borders, D + 1
    i4 x S    tokens per sequence
    i8 x S    byte at which each begins in the .bin
    i8 x D+1  first sequence of each document, then S

Give `--data-path DIR/train` to Megatron. Where not every token carries loss, `train_loss_mask` is a second pair with
one uint8 per token. A split without tokens has no files: an empty file can't be mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.export.split import SplitJob
from penstock.export.stream import TokenStream

__all__ = ["write_split"]

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
TYPE_CODES = {"uint8": 1, "int32": 4, "uint16": 8}

Read = Callable[[int, int], npt.NDArray[Any]]


def write_split(job: SplitJob) -> dict[str, Any]:
    """Writes the pair and, where needed, the pair of its mask."""
    stream = job.stream
    if not stream.num_tokens:
        return {"prefix": None, "loss_mask": None}
    stream.refuse_documents_over(2**31 - 1, reader="Megatron")
    narrow = stream.dtype.itemsize == 2
    _write_pair(
        job,
        job.split,
        read=stream.tokens if narrow else stream.signed_tokens,
        dtype="uint16" if narrow else "int32",
        advance=job.advance,
    )
    facts: dict[str, Any] = {"prefix": job.split, "loss_mask": None, "dtype": "uint16" if narrow else "int32"}
    if stream.has_loss_runs:
        facts["loss_mask"] = f"{job.split}_loss_mask"
        _write_pair(job, facts["loss_mask"], read=_mask_of(stream), dtype="uint8", advance=lambda _: None)
    return facts


def _mask_of(stream: TokenStream) -> Read:
    return lambda begin, end: stream.carries_loss(begin, end).view(np.uint8)


def _write_pair(job: SplitJob, prefix: str, *, read: Read, dtype: str, advance: Callable[[int], None]) -> None:
    with job.folder.file(f"{prefix}.bin") as file:
        for begin, end in job.stream.stretches():
            file.write(read(begin, end))
            advance(end - begin)
    starts, documents = job.stream.starts, job.stream.num_documents
    with job.folder.file(f"{prefix}.idx") as file:
        file.write(HEADER + struct.pack("<QBQQ", VERSION, TYPE_CODES[dtype], documents, documents + 1))
        file.write(np.diff(starts).astype("<i4"))
        file.write((starts[:-1] * np.dtype(dtype).itemsize).astype("<i8"))
        file.write(np.arange(documents + 1, dtype="<i8"))
