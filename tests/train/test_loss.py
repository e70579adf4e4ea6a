from __future__ import annotations

import sys
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from penstock.errors import ConfigError
from penstock.load.torch import IGNORED_LABEL, TorchBatch
from penstock.train import ModelConfig, build_model
from penstock.train.chunked_loss import cross_entropy_sum
from penstock.train.loss import add_gradients, nats_of, refuse_impossible_kernel

SHAPE = ModelConfig(num_layers=2, num_heads=2, hidden_size=32, feed_forward_size=48).shape(vocab_size=100, seq_len=16)


def uneven_batch(rows: int) -> TorchBatch:
    """Rows with very different numbers of real targets, one row with none."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 100, (rows, 17), generator=generator)
    mask = torch.arange(16) < 2 * torch.arange(rows)[:, None]
    borders = torch.arange(0, 16 * rows + 1, 16, dtype=torch.int32)
    return TorchBatch(
        tokens=tokens, loss_mask=mask, cu_seqlens=borders, host_mask=mask.numpy(), host_borders=borders.numpy()
    )


def gradients(batch: TorchBatch, micro_batch_rows: int) -> tuple[float, list[torch.Tensor]]:
    model = build_model(SHAPE, seed=1)
    loss = add_gradients(
        model, batch, micro_batch_rows=micro_batch_rows, document_boundaries=True, autocast=nullcontext
    )
    return float(loss), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3, 4, 7])
def test_accumulation_gives_the_same_step(micro_batch_rows: int) -> None:
    batch = uneven_batch(8)
    whole_loss, whole = gradients(batch, 8)
    loss, pieces = gradients(batch, micro_batch_rows)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_real_targets() -> None:
    batch = uneven_batch(8)
    model = build_model(SHAPE, seed=1)
    log_probabilities = model(batch.inputs, batch.document_ids).double().log_softmax(-1)
    picked = [
        -float(log_probabilities[row, position, batch.labels[row, position]].detach())
        for row in range(8)
        for position in range(16)
        if batch.labels[row, position] != IGNORED_LABEL
    ]
    loss, _ = gradients(batch, 3)
    assert loss == pytest.approx(sum(picked) / len(picked), rel=1e-5)
    assert batch.num_targets == len(picked)


def test_a_batch_without_targets_has_no_gradient() -> None:
    loss, found = gradients(uneven_batch(1), 1)
    assert loss == 0.0
    assert all(torch.count_nonzero(each) == 0 for each in found)


def test_softmax_is_taken_in_float32() -> None:
    logits = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = uneven_batch(8).labels[6:8]
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert float(cross_entropy_sum(logits.flatten(0, 1), labels.flatten())) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("document_boundaries", [True, False])
@pytest.mark.parametrize("micro_batch_rows", [1, 3, 8])
def test_the_chunked_kernel_gives_the_same_step(micro_batch_rows: int, document_boundaries: bool) -> None:
    batch, found = uneven_batch(8), []
    for loss_kernel in ("plain", "chunked"):
        model = build_model(SHAPE, seed=1)
        loss = add_gradients(
            model,
            batch,
            micro_batch_rows=micro_batch_rows,
            document_boundaries=document_boundaries,
            autocast=nullcontext,
            loss_kernel=loss_kernel,
        )
        found.append((float(loss), [parameter.grad for parameter in model.parameters()]))
    (plain_loss, plain), (loss, chunked) = found
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for one, other in zip(plain, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_kernel", "device", "has_head_weight", "message"),
    [
        ("chunked", "cpu", False, "more than one matrix"),
        ("liger", "cuda", True, "liger-kernel is not installed"),
        ("cce", "cuda", True, "cut-cross-entropy is not installed"),
    ],
)
def test_a_kernel_that_cannot_work_is_refused(loss_kernel, device, has_head_weight, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_impossible_kernel(loss_kernel, device=device, has_head_weight=has_head_weight)
    assert "loss_kernel=" in caught.value.hint


@pytest.mark.parametrize("loss_kernel", ["liger", "cce"])
def test_a_packages_kernel_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, loss_kernel: str) -> None:
    """The packages run on GPUs only; what they are called with is checked against a stand-in of their signatures."""
    fake = types.ModuleType("fake")

    def linear_cross_entropy(e, c, targets, *, ignore_index, reduction):
        return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, *, ignore_index: int, reduction: str) -> None:
            self.options = {"ignore_index": ignore_index, "reduction": reduction}

        def __call__(self, lin_weight, _input, target):
            return linear_cross_entropy(_input, lin_weight, target, **self.options)

    fake.linear_cross_entropy = linear_cross_entropy
    fake.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss
    for name in ("liger_kernel", "liger_kernel.transformers", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, fake)
    model, batch = build_model(SHAPE, seed=1), uneven_batch(4)
    options = {"document_boundaries": True, "autocast": nullcontext}
    found = nats_of(model, batch, loss_kernel=loss_kernel, **options)
    torch.testing.assert_close(found, nats_of(model, batch, **options), rtol=1e-5, atol=1e-5)
