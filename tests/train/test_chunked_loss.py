from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.load.torch import IGNORED_LABEL
from penstock.train.chunked_loss import CHUNK_MULTIPLE, chunk_tokens, chunked_cross_entropy_sum
from penstock.train.tuning.memory import chunk_logits_bytes


def problem(num_tokens: int, size: int, vocab: int, *, seed: int, scored: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(num_tokens, size, generator=generator).requires_grad_()
    weight = torch.randn(vocab, size, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    labels[torch.rand(num_tokens, generator=generator) >= scored] = IGNORED_LABEL
    return vectors, weight, labels


def plain(vectors: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((vectors @ weight.T).float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    size=st.integers(1, 9),
    vocab=st.integers(1, 30),
    tokens=st.integers(1, 50),
    seed=st.integers(0, 999),
    scored=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([1.0, 0.01]),
)
def test_equals_the_plain_loss_and_its_gradients(num_tokens, size, vocab, tokens, seed, scored, scale) -> None:
    vectors, weight, labels = problem(num_tokens, size, vocab, seed=seed, scored=scored)
    expected = plain(vectors, weight, labels)
    wanted = torch.autograd.grad(expected * scale, (vectors, weight))
    found = chunked_cross_entropy_sum(vectors, weight, labels, tokens=tokens)
    gradients = torch.autograd.grad(found * scale, (vectors, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    vectors, weight, labels = problem(9, 4, 11, seed=1, scored=0.7)
    frozen = weight.detach()
    (wanted,) = torch.autograd.grad(plain(vectors, frozen, labels), (vectors,))
    loss = chunked_cross_entropy_sum(vectors, frozen, labels, tokens=4)
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None]
    assert [tensor.shape for tensor in saved] == [vectors.shape]
    loss.backward()
    torch.testing.assert_close(vectors.grad, wanted, rtol=1e-4, atol=1e-5)
    assert weight.grad is None


def test_without_gradients_only_the_loss_is_computed() -> None:
    vectors, weight, labels = problem(9, 4, 11, seed=1, scored=0.7)
    with torch.no_grad():
        loss = chunked_cross_entropy_sum(vectors, weight, labels, tokens=4)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, plain(vectors, weight, labels).detach(), rtol=1e-5, atol=1e-5)


def test_under_autocast_products_are_bfloat16_and_softmax_float32() -> None:
    vectors, weight, labels = problem(70, 16, 33, seed=2, scored=0.9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy_sum(vectors, weight, labels, tokens=13)
        logits = F.linear(vectors, weight)
    assert logits.dtype is torch.bfloat16
    expected = F.cross_entropy(logits.double(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    assert loss.dtype is torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    wanted = torch.autograd.grad(expected, (vectors, weight))
    gradients = torch.autograd.grad(loss, (vectors, weight))
    for one, other in zip(gradients, wanted, strict=True):
        assert one.dtype is torch.float32
        assert float((one - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize(("vocab", "tokens"), [(320, 13_056), (10**8, 64)])
def test_chunks_are_whole_tiles_within_the_limit(vocab: int, tokens: int) -> None:
    assert chunk_tokens(vocab, torch.device("cpu")) == tokens
    assert tokens % CHUNK_MULTIPLE == 0


def test_a_gpu_gives_chunks_a_sixteenth_of_its_memory() -> None:
    assert chunk_logits_bytes(16 * 2**30) == 2**30
    assert chunk_logits_bytes(None) == 16 * 2**20
