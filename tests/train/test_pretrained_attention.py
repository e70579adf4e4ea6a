"""Models of transformers with attention over borders: what such a kernel computes stands in for it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.train import attention
from penstock.train.attention import BORDER_KERNELS, KERNELS, document_borders
from penstock.train.choices import Choices
from penstock.train.pretrained import load_pretrained, refuse_unfit_attention
from penstock.train.pretrained_attention import can_take_borders
from penstock.train.tuning.trials import Trials

from .conftest import Train, losses, tiny_config
from .documents_apart import one_document_after_the_other
from .test_adapter_runs import settings

pytest.importorskip("transformers")

SavedModel = Callable[[str], Path]
IDS = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[3] * 7 + [4] + [9] * 16, [1] * 24])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over borders work on this CPU, and may be set."""
    monkeypatch.setattr(attention, "_varlen_attention", one_document_after_the_other)
    monkeypatch.setattr(attention.cudnn_attention, "attended_documents", one_document_after_the_other)
    monkeypatch.setattr(attention, "usable_kernels", lambda *_, **__: KERNELS)


@pytest.mark.parametrize("borders", [None, document_borders(DOCUMENTS)])
@pytest.mark.parametrize("kernel", BORDER_KERNELS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_documents_by_borders_say_the_same_as_by_mask(
    kind: str, kernel: str, borders: Tensor | None, saved_model: SavedModel, stand_ins: None
) -> None:
    model = load_pretrained(str(saved_model(kind)), dtype=torch.float32)
    with torch.no_grad():
        expected, whole = model(IDS, DOCUMENTS), model(IDS)
        model.attention_kernel = kernel
        torch.testing.assert_close(model(IDS, DOCUMENTS, borders), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(IDS), whole, rtol=1e-5, atol=1e-5)
        model.attention_kernel = "sdpa"
        assert torch.equal(model(IDS, DOCUMENTS), expected)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "mamba", "falcon"])
def test_windows_caps_recurrence_and_code_of_its_own_keep_to_the_other_kernels(
    kind: str, saved_model: SavedModel
) -> None:
    model = load_pretrained(str(saved_model(kind)), dtype=torch.float32)
    assert not can_take_borders(model.causal)
    assert not set(BORDER_KERNELS) & set(model.attention_kernels)


@pytest.mark.parametrize("kernel", BORDER_KERNELS)
def test_a_kernel_set_by_name_trains_as_the_mask_does(
    kernel: str, tmp_path: Path, run_training: Train, saved_model: SavedModel, stand_ins: None
) -> None:
    for name in (kernel, "sdpa"):
        run_training(tmp_path / name, *settings(saved_model("llama"), f"attention={name}"))
    expected = [loss for _, loss in losses(tmp_path / "sdpa")]
    assert [loss for _, loss in losses(tmp_path / kernel)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kernel", BORDER_KERNELS)
@pytest.mark.parametrize(
    ("kind", "asked", "ways_out"),
    [("gpt2", "dropout of 0.1", ["sdpa"]), ("granite", r"scale of 0.5 .*1/sqrt\(8\)", ["sdpa", "flex"])],
)
def test_a_kernel_set_by_name_that_does_less_than_the_model_asks_is_refused_in_one_line(
    kind: str,
    asked: str,
    ways_out: list[str],
    kernel: str,
    tmp_path: Path,
    run_training: Train,
    saved_model: SavedModel,
    stand_ins: None,
) -> None:
    given = settings(saved_model(kind))
    with pytest.raises(ConfigError, match=f"attention is '{kernel}'.*{asked}") as refused:
        run_training(tmp_path / "refused", *given, f"attention={kernel}")
    assert "\n" not in refused.value.message
    assert [way for way in KERNELS if f"attention={way}" in refused.value.hint] == ways_out
    run_training(tmp_path / "hint", *given, "steps=1", "attention=sdpa")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "granite"])
def test_asking_leaves_no_trace(kind: str, saved_model: SavedModel) -> None:
    model = load_pretrained(str(saved_model(kind)), dtype=torch.float32)
    expected, random_state = model(IDS, DOCUMENTS), torch.get_rng_state()
    try:
        refuse_unfit_attention(model, "varlen")
    except ConfigError:
        assert kind != "llama"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module.training for module in (model, model.causal, *model.modules()))
    assert model.attention_kernel == "sdpa"
    assert torch.equal(model(IDS, DOCUMENTS), expected)


@pytest.mark.parametrize(("kind", "asked"), [("gpt2", "dropout"), ("granite", "scale")])
def test_a_trial_of_such_a_kernel_fails_and_that_is_all(
    kind: str, asked: str, saved_model: SavedModel, stand_ins: None
) -> None:
    trials = Trials(load_pretrained(str(saved_model(kind)), dtype=torch.float32), tiny_config())
    usual = {"device": "cpu", "dtype": "float32", "micro_batch_rows": 1, "num_threads": 1, "fused_optimizer": True}
    with trials.prepared("cpu"):
        assert asked in trials(Choices(**usual, attention="varlen")).failure
        assert not trials(Choices(**usual, attention="sdpa")).failure
