"""Every kernel computes what a dense mask says.

flex runs here without compiling, forward only; varlen needs a GPU, so its borders are tested by attending to each
document alone. The kernels that torch's own sdpa picks between are the same call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from penstock.errors import ConfigError
from penstock.train import ModelConfig, attention, build_model
from penstock.train.attention import (
    KERNELS,
    attended,
    attention_mask,
    check_kernel,
    document_block_mask,
    document_borders,
    document_mask,
    usable_kernels,
)

from .documents_apart import one_document_after_the_other


@st.composite
def rows_of_documents(draw: Any, max_positions: int = 400) -> torch.Tensor:
    """[B, T] ids in runs of any length, numbered on over the rows, as a loader gives them."""
    positions = draw(st.integers(1, max_positions))
    rows, number = [], 0
    for _ in range(draw(st.integers(1, 3))):
        borders = draw(st.lists(st.integers(0, positions - 1), max_size=6).map(set))
        row = []
        for position in range(positions):
            number += position in borders or position == 0
            row.append(number)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)


def heads(seed: int, rows: int, num_heads: int, positions: int) -> torch.Tensor:
    return torch.randn(rows, num_heads, positions, 8, generator=torch.Generator().manual_seed(seed))


def test_the_mask_equals_its_definition() -> None:
    documents = torch.tensor([[5, 5, 2, 2, 2], [1, 1, 1, 1, 7]])
    expected = [
        [[j <= i and bool(row[i] == row[j]) for j in range(len(row))] for i in range(len(row))] for row in documents
    ]
    assert document_mask(documents).squeeze(1).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(rows_of_documents())
def test_the_block_mask_is_the_one_torch_makes_of_the_dense_mask(documents: torch.Tensor) -> None:
    dense = document_mask(documents)[:, 0]
    rows, positions = documents.shape
    expected = create_block_mask(lambda b, h, q, k: dense[b, q, k], rows, None, positions, positions, device="cpu")
    found = document_block_mask(documents)
    assert torch.equal(found.kv_num_blocks, expected.kv_num_blocks)
    assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(found.to_dense(), expected.to_dense())
    for number in range(found.kv_indices.shape[2]):
        for row in range(rows):
            count = int(found.kv_num_blocks[row, 0, number])
            ours, theirs = (mask.kv_indices[row, 0, number, :count] for mask in (found, expected))
            assert torch.equal(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(rows_of_documents(max_positions=60))
def test_borders_cut_the_rows_into_their_documents(documents: torch.Tensor) -> None:
    borders = document_borders(documents)
    flat = documents.flatten().tolist()
    expected = [place for place in range(len(flat)) if place == 0 or flat[place] != flat[place - 1]]
    assert borders.dtype == torch.int32
    assert borders.tolist() == expected + [len(flat)] * (len(borders) - len(expected))
    assert len(borders) > len(expected)  # the last document has an end too


def test_borders_have_few_sizes() -> None:
    few = torch.arange(4).repeat_interleave(8)[None]
    many = torch.arange(32)[None]
    sizes = [len(document_borders(documents)) for documents in (few, few // 2, many)]
    assert sizes == [5, 3, 33]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "flash", "flex", "varlen", "cudnn-varlen"])
def test_all_kernels_agree_with_sdpa(kernel: str, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = torch.tensor([[1] * 70 + [2] * 100 + [3] * 40, [4] * 1 + [5] * 139 + [6] * 70])
    query, key, value = heads(1, 2, 4, 210), heads(2, 2, key_heads, 210), heads(3, 2, key_heads, 210)
    if kernel in ("efficient", "cudnn"):  # absent on a CPU: the plain formula stands in for the kernel
        monkeypatch.setitem(attention.SDPA_BACKENDS, kernel, torch.nn.attention.SDPBackend.MATH)
    if kernel == "varlen":
        monkeypatch.setattr(attention, "_varlen_attention", one_document_after_the_other)
    if kernel == "cudnn-varlen":
        monkeypatch.setattr(attention.cudnn_attention, "attended_documents", one_document_after_the_other)
    for ids in (None, documents):
        if kernel == "flash" and ids is not None:
            continue
        expected = attended("sdpa", query, key, value, attention_mask("sdpa", ids))
        found = attended(kernel, query, key, value, attention_mask(kernel, ids))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_takes_another_kernel_between_steps() -> None:
    shape = ModelConfig(num_layers=2, hidden_size=32, feed_forward_size=48).shape(vocab_size=100, seq_len=150)
    model = build_model(shape, seed=1)
    ids = torch.randint(0, 100, (2, 150), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[1] * 60 + [2] * 90, [3] * 149 + [4]])
    with torch.no_grad():
        expected = model(ids, documents)
        model.attention_kernel = "flex"
        assert model.attention_kernel == "flex"
        found = model(ids, documents)
        assert not torch.equal(found, expected)  # another kernel rounds otherwise: it was really taken
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        model.attention_kernel = "sdpa"
        assert torch.equal(model(ids, documents), expected)
    with pytest.raises(ValueError, match="quick"):
        model.attention_kernel = "quick"


def test_other_documents_need_no_other_compilation() -> None:
    query, key, value = (heads(seed, 1, 2, 200) for seed in (1, 2, 3))
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter)
    def layer(mask: Any) -> torch.Tensor:
        return attended("flex", query, key, value, mask)

    for border in (20, 77, 140):
        documents = (torch.arange(200) >= border).long()[None]
        found = layer(document_block_mask(documents))
        torch.testing.assert_close(found, attended("sdpa", query, key, value, document_mask(documents)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("has_cudnn", [True, False])
def test_kernels_are_offered_where_they_work(has_cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.cudnn_attention, "is_available", lambda: has_cudnn)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert usable_kernels(cpu, dtype=torch.float32, document_boundaries=True) == ("sdpa",)
    with_borders = usable_kernels(gpu, dtype=torch.bfloat16, document_boundaries=True)
    assert set(with_borders) == set(KERNELS) - {"flash"} - ({"cudnn-varlen"} if not has_cudnn else set())
    assert set(usable_kernels(gpu, dtype=torch.float32, document_boundaries=True)) == {"sdpa", "efficient", "flex"}
    assert "flash" in usable_kernels(gpu, dtype=torch.bfloat16, document_boundaries=False)
    for kernel in with_borders:
        check_kernel(kernel, gpu, dtype=torch.bfloat16, document_boundaries=True)
    for kernel, device in (("flash", gpu), ("flex", cpu), ("flesh", gpu)):
        with pytest.raises(ConfigError, match=kernel):
            check_kernel(kernel, device, dtype=torch.bfloat16, document_boundaries=True)


def test_a_kernel_whose_package_is_missing_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.cudnn_attention, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cudnn-varlen") as refused:
        check_kernel("cudnn-varlen", torch.device("cuda"), dtype=torch.bfloat16, document_boundaries=True)
    assert "pip install nvidia-cudnn-frontend" in str(refused.value.hint)
