"""Tensors as the bytes of a safetensors file, piece by piece.

In: named tensors, on any device. Out: the very bytes that `safetensors.torch.save` would give, in pieces that are
written one after the other. The library makes the whole file in memory first, and copies it once more: for a large
model that is twice its size beside the model.

Memory: a few MiB, and one tensor where it isn't on the CPU or not contiguous.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["safetensors_pieces"]

# Small tensors are put together: a write for each would be most of the work.
PIECE_BYTES = 4 * 2**20
ALIGNMENT = 8

# In the order in which the library writes them: the widest first, so that every tensor begins on a border of its own.
_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}


def safetensors_pieces(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | bytearray | memoryview]:
    """The pieces in order; each is to be used before the next is asked for."""
    in_order = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    waiting = bytearray(_header(in_order, metadata))
    for _, tensor in in_order:
        view = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        if len(waiting) + len(view) > PIECE_BYTES:
            yield waiting
            waiting = bytearray()
        if len(view) > PIECE_BYTES:
            yield view
        else:
            waiting += view
    yield waiting


def _header(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
