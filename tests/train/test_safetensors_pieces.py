"""The pieces together are what the library writes."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from penstock.train import safetensors_pieces as module
from penstock.train.safetensors_pieces import _NAMES, safetensors_pieces

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(list(_NAMES)), SHAPES),
    max_size=6,
)


@given(TENSORS, st.sampled_from([None, {"format": "pt"}, {"a": '\u00e9\n"'}]), st.sampled_from([1, 64, 2**22]))
def test_the_bytes_are_the_librarys(
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None, piece_bytes: int
) -> None:
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randint(0, 2, shape, generator=draw).to(dtype) for name, (dtype, shape) in shapes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        found = b"".join(safetensors_pieces(tensors, metadata=metadata))
    assert found == save(tensors, metadata=metadata)


def test_a_view_is_written_as_what_it_shows() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert b"".join(safetensors_pieces({"t": whole.T})) == save({"t": whole.T.contiguous()})


def test_no_copy_of_the_tensors_is_made() -> None:
    tensors = {str(number): torch.zeros(2**22) for number in range(4)}  # 16 MiB each
    tracemalloc.start()
    try:
        assert sum(memoryview(piece).nbytes for piece in safetensors_pieces(tensors)) > 64 * 2**20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 9 * 2**20
