"""Every choice takes effect in the trainer, is recorded, and leaves the losses alone where it should."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, ResumeError
from penstock.runlog import RunLog, read_records
from penstock.train import activation_checkpointing, build_model, loss
from penstock.train.activation_checkpointing import checkpointed_activations
from penstock.train.checkpoint import OPTIMIZER_NAME, plain_parameters, read_tensors
from penstock.train.choices import Choices, numeric_settings, reused_choices
from penstock.train.tuning.applying import applied
from penstock.train.tuning.trials import made_up_batch

from ..conftest import Train, assert_same_tensors, losses, saved_tensors, tiny_config

SHORT = ["steps=4", "eval_every_steps=null", "checkpoint_every_steps=null", "sample_tokens=0", "eval_rows=2"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> list[float]:
    from penstock.store import open_store
    from penstock.train import train

    folder = tmp_path_factory.mktemp("plain")
    with open_store(store_path) as store, RunLog(folder) as log:
        train(tiny_config(*SHORT), store, folder, log)
    return [loss for _, loss in losses(folder)]


def choices_of(folder: Path) -> dict[str, Any]:
    return {record["name"]: record["value"] for record in read_records(folder) if record["kind"] == "choice"}


@pytest.mark.parametrize(
    ("setting", "exactly"),
    [
        ("loss_kernel=chunked", False),
        ("activation_checkpointing=selective", True),
        ("activation_checkpointing=full", True),
        ("micro_batch_rows=4", False),
        ("micro_batch_rows=3", False),
        ("attention=sdpa", True),
        ("tf32=false", True),
        ("tune=rules", True),
        ("tune=off", True),
    ],
)
def test_the_losses_stay(run_training: Train, tmp_path: Path, plain_losses, setting: str, exactly: bool) -> None:
    run_training(tmp_path, *SHORT, setting)
    found = [loss for _, loss in losses(tmp_path)]
    assert found == (plain_losses if exactly else pytest.approx(plain_losses, rel=1e-4))
    key, _, value = setting.partition("=")
    assert key == "tune" or str(choices_of(tmp_path)[key]).lower() == value


@pytest.mark.parametrize("setting", ["loss_kernel=chunked", "activation_checkpointing=full"])
def test_the_kernel_named_is_the_one_that_runs(
    run_training: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    module, name = {
        "loss_kernel=chunked": (loss, "chunked_cross_entropy_sum"),
        "activation_checkpointing=full": (activation_checkpointing, "checkpoint"),
    }[setting]
    calls, original = [], getattr(module, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, counting)
    run_training(tmp_path, *SHORT, setting)
    # 4 steps of 2 micro-batches: the loss once each and in the evaluation, the checkpoint once for each of 2 blocks.
    assert len(calls) > 8 if module is loss else len(calls) == 16


@pytest.mark.parametrize("optimizer", ["adamw-bf16", "adamw-8bit"])
def test_smaller_states_train_and_resume_to_the_bit(
    run_training: Train, tmp_path: Path, plain_losses, optimizer: str
) -> None:
    if optimizer == "adamw-8bit":
        pytest.importorskip("bitsandbytes")
    # Matrices of 4,096 numbers and more: smaller ones stay in float32.
    settings = [*SHORT, f"optimizer={optimizer}", "model.hidden_size=64", "model.feed_forward_size=64"]
    whole = run_training(tmp_path / "whole", *settings)
    found = [loss for _, loss in losses(tmp_path / "whole")]
    assert found[-1] < found[0]
    assert choices_of(tmp_path / "whole")["optimizer"] == optimizer
    state = read_tensors(whole.checkpoint / OPTIMIZER_NAME)
    narrow = torch.bfloat16 if optimizer == "adamw-bf16" else torch.uint8
    assert any(tensor.dtype is narrow for tensor in state.values())
    run_training(tmp_path / "parts", *settings, "stop_after_steps=2")
    parts = run_training(tmp_path / "parts", *settings, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same_tensors(saved_tensors(parts.checkpoint), saved_tensors(whole.checkpoint))


@pytest.mark.parametrize("way", ["blocks", "whole"])
@pytest.mark.parametrize("loss_kernel", ["plain", "chunked"])
def test_compiled_in_place(
    run_training: Train,
    tmp_path: Path,
    plain_losses,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    loss_kernel: str,
) -> None:
    """Traced by the compiler's front half and run as traced: the back half needs a C++ compiler and minutes."""
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(compile_module, backend="eager"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = run_training(tmp_path, *SHORT, f"compile={way}", f"loss_kernel={loss_kernel}")
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx(plain_losses, rel=1e-4)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
    names = saved_tensors(result.checkpoint)
    assert not [name for name in names if "_orig_mod" in name or "module." in name]


@pytest.mark.torture(lane="E")
def test_compiled_for_real(run_training: Train, tmp_path: Path, plain_losses) -> None:
    torch._dynamo.reset()
    run_training(tmp_path, *SHORT, "compile=blocks")
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx(plain_losses, rel=1e-3)


def test_choices_are_undone_and_names_stay() -> None:
    config = tiny_config()
    model = build_model(config.model.shape(vocab_size=320, seq_len=32), seed=1)
    names = list(plain_parameters(model))
    ids = made_up_batch(rows=2, seq_len=32, vocab_size=320, device=CPU).inputs
    before = model(ids)
    choices = Choices(
        device="cpu",
        dtype="float32",
        micro_batch_rows=1,
        num_threads=1,
        fused_optimizer=True,
        attention="efficient",
        activation_checkpointing="full",
        compile="whole",
    )
    with applied(model, choices):
        assert model.attention_kernel == "efficient"
        assert list(plain_parameters(model)) == list(dict(model.named_parameters())) == names
    assert model.attention_kernel == "sdpa"
    assert "hidden" not in vars(model)
    assert not [module for module in model.modules() if module._compiled_call_impl or "forward" in vars(module)]
    assert torch.equal(model(ids), before)


def test_recomputed_dropout_is_the_same_dropout() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor, *, share: float) -> torch.Tensor:
            return torch.nn.functional.dropout(self.linear(hidden).tanh(), share)

    torch.manual_seed(1)
    blocks = [Block() for _ in range(3)]
    found = []
    for how_much in ("none", "selective", "full"):
        torch.manual_seed(2)
        hidden = torch.ones(4, 8)
        with checkpointed_activations(blocks, how_much):
            for block in blocks:
                hidden = block(hidden, share=0.5)
            hidden.sum().backward()
        found.append([parameter.grad.clone() for block in blocks for parameter in block.parameters()])
        for block in blocks:
            block.zero_grad()
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_tf32_is_a_switch_of_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"dtype": "float32", "micro_batch_rows": 1, "num_threads": 1, "fused_optimizer": True}
    before = torch.get_float32_matmul_precision()
    for device, tf32, deterministic, expected in [
        ("cuda", True, False, "high"),
        ("cuda", False, False, "highest"),
        ("cuda", True, True, "highest"),
        ("cpu", True, False, before),
    ]:
        with numeric_settings(Choices(device=device, tf32=tf32, **usual), deterministic=deterministic):
            assert torch.get_float32_matmul_precision() == expected
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss_kernel=liger", "liger-kernel is not installed"),
        ("loss_kernel=cce", "cut-cross-entropy is not installed"),
        ("attention=varlen", "varlen"),
        ("attention=flash", "flash"),
    ],
)
def test_what_cannot_work_here_is_refused(run_training: Train, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run_training(tmp_path, *SHORT, setting)
    assert caught.value.hint


def test_choices_of_a_later_version_are_refused(tmp_path: Path) -> None:
    usual = {"device": "cpu", "dtype": "float32", "micro_batch_rows": 1, "num_threads": 1, "fused_optimizer": True}
    with RunLog(tmp_path) as log:
        assert reused_choices(usual, log).optimizer == "adamw"  # of an earlier version: what it had
        with pytest.raises(ResumeError, match="warp_speed"):
            reused_choices({**usual, "warp_speed": True}, log)
