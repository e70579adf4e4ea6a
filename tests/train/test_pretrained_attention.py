"""Models of transformers with attention over borders: what such a kernel computes stands in for it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.train import attention
from penstock.train.attention import BORDER_KERNELS, document_borders
from penstock.train.pretrained import load_pretrained
from penstock.train.pretrained_attention import can_take_borders

from .documents_apart import one_document_after_the_other

pytest.importorskip("transformers")

SavedModel = Callable[[str], Path]
IDS = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[3] * 7 + [4] + [9] * 16, [1] * 24])


@pytest.mark.parametrize("borders", [None, document_borders(DOCUMENTS)])
@pytest.mark.parametrize("kernel", BORDER_KERNELS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_documents_by_borders_say_the_same_as_by_mask(
    kind: str, kernel: str, borders: Tensor | None, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_pretrained(str(saved_model(kind)), dtype=torch.float32)
    with torch.no_grad():
        expected, whole = model(IDS, DOCUMENTS), model(IDS)
        monkeypatch.setattr(attention, "_varlen_attention", one_document_after_the_other)
        monkeypatch.setattr(attention.cudnn_attention, "attended_documents", one_document_after_the_other)
        model.attention_kernel = kernel
        torch.testing.assert_close(model(IDS, DOCUMENTS, borders), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(IDS), whole, rtol=1e-5, atol=1e-5)
        model.attention_kernel = "sdpa"
        assert torch.equal(model(IDS, DOCUMENTS), expected)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "mamba"])
def test_windows_caps_and_recurrence_keep_to_the_other_kernels(kind: str, saved_model: SavedModel) -> None:
    model = load_pretrained(str(saved_model(kind)), dtype=torch.float32)
    assert not can_take_borders(model.causal)
    assert not set(BORDER_KERNELS) & set(model.attention_kernels)
