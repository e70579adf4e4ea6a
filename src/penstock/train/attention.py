"""Causal attention by one of several kernels, chosen by name.

In: query, key and value [B, heads, T, head] and a mask that `attention_mask` made, once per batch, of the document ids
[B, T]. Out: [B, heads, T, head]. All kernels compute the same function and differ in rounding, speed and memory:

    sdpa          torch picks; documents by a dense boolean mask, B x T x T bytes
    flash         torch's flash kernel; takes no mask, so only rows without borders
    cudnn         cuDNN's, dense mask
    efficient     the memory-efficient one, dense mask
    flex          compiled from a description; documents by blocks of 128 x 128 that are skipped, full or partly masked
    varlen        flash over documents laid end to end; needs no mask, and half precision
    cudnn-varlen  the same by cuDNN (cudnn_attention.py), where its Python package is installed

A document is a run of equal ids in a row. Block tables and borders are made by arithmetic on the ids, without the dense
mask, outside compiled layers, and in sizes that don't depend on the documents (borders' grow by doubling), so that
compiled layers stay compiled. Whoever knows the borders already gives them along; else the host has to wait for the
device once, to learn how many there are. Without document ids all but the named sdpa ones are plain causal attention by
sdpa.

Figures of a GPU are in docs/models.md as far as they were measured; on a CPU `sdpa` is the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from penstock.errors import ConfigError, nearest_first
from penstock.load.torch import num_border_places
from penstock.train import cudnn_attention

__all__ = [
    "BORDER_KERNELS",
    "KERNELS",
    "SDPA_BACKENDS",
    "AttentionMask",
    "attended",
    "attention_mask",
    "check_kernel",
    "document_block_mask",
    "document_borders",
    "document_mask",
    "usable_kernels",
]

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Kernels that take documents by their borders.
BORDER_KERNELS = ("varlen", "cudnn-varlen")
KERNELS = ("sdpa", *SDPA_BACKENDS, "flex", *BORDER_KERNELS)

# The size flex's own kernels are tuned for, and its default.
BLOCK_POSITIONS = 128

AttentionMask = Tensor | BlockMask | None


def usable_kernels(device: torch.device, *, dtype: torch.dtype, document_boundaries: bool) -> tuple[str, ...]:
    """The kernels worth trying here; `sdpa`, which always works, first.

    On a CPU it is the only one: flex has no backward pass there, and the others are sdpa's own choice.
    """
    if device.type != "cuda":
        return ("sdpa",)
    is_half = dtype in (torch.bfloat16, torch.float16)
    of_half = ("cudnn",) if document_boundaries else ("flash", "cudnn")
    # The faster one first: trials take time, and may have it for one kernel only.
    by_borders = {"cudnn-varlen": cudnn_attention.is_available(), "varlen": _varlen_attention is not None}
    with_documents = ("flex", *(name for name, is_here in by_borders.items() if is_half and is_here))
    return ("sdpa", *(of_half if is_half else ()), "efficient", *(with_documents if document_boundaries else ()))


def check_kernel(kernel: str, device: torch.device, *, dtype: torch.dtype, document_boundaries: bool) -> None:
    """Refuses a kernel by name where it can't train."""
    if kernel not in KERNELS:
        raise ConfigError(
            f"attention kernel {kernel!r} is unknown", hint=f"known kernels: {nearest_first(kernel, KERNELS)}"
        )
    usable = usable_kernels(device, dtype=dtype, document_boundaries=document_boundaries)
    if kernel not in usable and not (kernel in ("flex", *BORDER_KERNELS) and not document_boundaries):
        rows = "rows with document borders" if document_boundaries else "rows without borders"
        raise ConfigError(
            f"attention kernel {kernel!r} can't train {rows} in {dtype} on {device.type}",
            hint=f"leave it out to have it chosen, or take {' or '.join(usable)}{_wish(kernel)}",
        )


def _wish(kernel: str) -> str:
    is_wanted = kernel == "cudnn-varlen" and not cudnn_attention.is_available()
    return f"; cudnn-varlen needs a Hopper GPU or a later one, and pip install {cudnn_attention.PACKAGE}" * is_wanted


def attention_mask(kernel: str, document_ids: Tensor | None, borders: Tensor | None = None) -> AttentionMask:
    """What `attended` needs to keep a position inside its document; None for plain causal attention.

    `borders` are those of `document_ids`, if known: see `document_borders`.
    """
    if document_ids is None:
        return None
    if kernel == "flex":
        return document_block_mask(document_ids)
    if kernel in BORDER_KERNELS:
        return document_borders(document_ids) if borders is None else borders
    return document_mask(document_ids)


def attended(kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """query [B, heads, T, head], key and value [B, key heads, T, head] -> [B, heads, T, head]."""
    shares_keys = key.shape[1] != query.shape[1]
    if isinstance(mask, BlockMask):
        # On a GPU it must be compiled, or it forms all scores; inside a layer that is being compiled it is part of it.
        is_alone = query.device.type == "cuda" and not torch.compiler.is_compiling()
        attend: Any = _compiled_flex_attention() if is_alone else flex_attention
        mixed: Tensor = attend(query, key, value, block_mask=mask, enable_gqa=shares_keys)
        return mixed
    if kernel in BORDER_KERNELS and mask is not None:
        return _attended_by_borders(kernel, query, key, value, mask)
    if kernel not in SDPA_BACKENDS:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )
    if shares_keys and kernel != "flash":  # these two want a key for each query
        key, value = (_one_each(heads, query.shape[1]) for heads in (key, value))
    with sdpa_kernel(SDPA_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key.shape[1] != query.shape[1]
        )


def document_mask(document_ids: Tensor) -> Tensor:
    """[B, T] -> boolean [B, 1, T, T]: true where a position (third axis) may see another (fourth axis)."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    positions = document_ids.shape[1]
    causal = torch.ones(positions, positions, dtype=torch.bool, device=document_ids.device).tril()
    return same & causal


def document_block_mask(document_ids: Tensor) -> BlockMask:
    """The same for flex: which blocks of 128 x 128 hold anything to see, and which need no look at each position.

    Documents are runs, so the ids at the two ends of a block say it all: B x (T/128)^2 comparisons instead of B x T^2.
    """
    runs = _runs(document_ids)
    positions = runs.shape[1]
    num_blocks = -(-positions // BLOCK_POSITIONS)
    numbers = torch.arange(num_blocks, device=runs.device)
    first = runs[:, numbers * BLOCK_POSITIONS]  # [B, blocks]
    last = runs[:, ((numbers + 1) * BLOCK_POSITIONS).clamp(max=positions) - 1]
    is_whole = (numbers + 1) * BLOCK_POSITIONS <= positions  # the last block may reach past the row
    query, key = numbers[:, None], numbers[None, :]
    has_any = (key <= query) & (last[:, None, :] >= first[:, :, None])
    has_all = (key < query) & (first[:, None, :] == last[:, :, None]) & is_whole[:, None]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (runs[row, query] == runs[row, key])

    return BlockMask.from_kv_blocks(
        *_block_table(has_any & ~has_all),
        *_block_table(has_all),
        BLOCK_SIZE=BLOCK_POSITIONS,
        mask_mod=sees,
        seq_lengths=(positions, positions),
    )


def _block_table(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """[B, blocks, blocks] -> how many key blocks each query block has [B, 1, blocks], and which come first."""
    numbers = wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return wanted.sum(-1, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None].contiguous()


def document_borders(document_ids: Tensor) -> Tensor:
    """Where documents begin over the flat B x T positions, int32, filled up with B x T: empty documents at the end.

    The number of places is that of `num_border_places`. Finding it makes the host wait for the device once.
    """
    rows, positions = document_ids.shape
    runs = _runs(document_ids)
    # Each row begins a document: its runs are numbered on from the row before.
    ends = runs[:, -1].long() + 1
    flat = (runs + (ends.cumsum(0) - ends)[:, None]).flatten()
    num_places = num_border_places(int(ends.sum()), rows)
    total = rows * positions
    borders = torch.full((num_places + 1,), total, dtype=torch.int32, device=document_ids.device)
    places = torch.arange(total, dtype=torch.int32, device=document_ids.device)
    return borders.scatter_reduce_(0, flat, places, "amin")  # the first place of each run, in whatever order


def _runs(document_ids: Tensor) -> Tensor:
    """[B, T] -> [B, T] int32: 0, 1, 2… for the runs of equal ids in each row."""
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(begins, (1, 0)).cumsum(1, dtype=torch.int32)


def _attended_by_borders(kernel: str, query: Tensor, key: Tensor, value: Tensor, borders: Tensor) -> Tensor:
    """All documents of all rows end to end: [B, heads, T, head] -> [B x T, heads, head] and back."""
    rows, num_heads, positions, size = query.shape
    if kernel == "cudnn-varlen":
        flat_query, flat_key, flat_value = (
            heads.transpose(1, 2).reshape(rows * positions, -1, size) for heads in (query, key, value)
        )
        mixed = cudnn_attention.attended_documents(flat_query, flat_key, flat_value, borders, positions)
        return mixed.view(rows, positions, num_heads, size).transpose(1, 2)
    if _varlen_attention is None:
        raise ConfigError("attention kernel 'varlen' needs a torch that has it, 2.10 or later", hint="take flex")
    flat_query, flat_key, flat_value = (
        _one_each(heads, num_heads).transpose(1, 2).reshape(rows * positions, num_heads, size)
        for heads in (query, key, value)
    )
    mixed = _varlen_attention(flat_query, flat_key, flat_value, borders, positions)
    return mixed.view(rows, positions, num_heads, size).transpose(1, 2)


def _one_each(heads: Tensor, num_heads: int) -> Tensor:
    """Keys or values repeated, so that each query head has its own."""
    copies = num_heads // heads.shape[1]
    return heads if copies == 1 else heads.repeat_interleave(copies, dim=1)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _causal_varlen_attention() -> Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] | None:
    """Causal attention over borders and the longest length, if this torch has it; None if not."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # torch 2.10 says `is_causal=True`, later ones a window: everything to the left, nothing to the right.
    says_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if says_window else {"is_causal": True}

    def attend(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int) -> Tensor:
        mixed: Any = varlen_attn(query, key, value, borders, borders, longest, longest, **causal)
        output: Tensor = mixed  # a pair only where more is asked for
        return output

    return attend


_varlen_attention = _causal_varlen_attention()
