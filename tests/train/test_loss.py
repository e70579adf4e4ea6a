from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from penstock.load.torch import IGNORED_LABEL, TorchBatch
from penstock.train import ModelConfig, build_model
from penstock.train.loss import add_gradients, cross_entropy_sum

SHAPE = ModelConfig(num_layers=2, num_heads=2, hidden_size=32, feed_forward_size=48).shape(vocab_size=100, seq_len=16)


def uneven_batch(rows: int) -> TorchBatch:
    """Rows with very different numbers of real targets, one row with none."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 100, (rows, 17), generator=generator)
    mask = torch.arange(16) < 2 * torch.arange(rows)[:, None]
    borders = torch.arange(0, 16 * rows + 1, 16, dtype=torch.int32)
    return TorchBatch(tokens=tokens, loss_mask=mask, cu_seqlens=borders, host_mask=mask.numpy())


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
    assert float(cross_entropy_sum(logits, labels)) == pytest.approx(float(expected), rel=1e-6)
