"""The formula against counted bytes: parameters and optimizer exactly, a step's peak by the tensors alive on a CPU."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.train import ModelConfig, build_model
from penstock.train.activation_checkpointing import checkpointed_activations
from penstock.train.checkpoint import plain_parameters
from penstock.train.loss import add_gradients
from penstock.train.optimizer import allocate_state, build_optimizer, optimizer_tensors
from penstock.train.tuning.facts import facts_of_model, facts_of_shape
from penstock.train.tuning.memory import estimated_memory
from penstock.train.tuning.trials import made_up_batch

SEQ_LEN = 64
CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside the block that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number not in self._known and size:
            self._known.add(number)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, number, size)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size


def shape_of(*, hidden_size: int = 128, num_layers: int = 4, vocab_size: int = 320, **more: Any) -> Any:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "feed_forward_size": 384, **more}
    config = ModelConfig(hidden_size=hidden_size, num_layers=num_layers, **sizes)
    return config.shape(vocab_size=vocab_size, seq_len=SEQ_LEN)


def autocast_of(dtype: str) -> Any:
    def context() -> AbstractContextManager[None]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bfloat16" else nullcontext()

    return context


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_counted_exactly(tie: bool) -> None:
    shape = shape_of(tie_embeddings=tie)
    model = build_model(shape, seed=1)
    facts = facts_of_shape(shape, seq_len=SEQ_LEN)
    assert facts.num_trained == sum(each.numel() for each in model.parameters())
    assert facts.weight_bytes == sum(each.nbytes for each in model.parameters())
    assert facts.flops_per_token == model.flops_per_token(SEQ_LEN)
    of_model = facts_of_model(model, seq_len=SEQ_LEN)
    # A built model's look-up table is a matrix like any other: counted among the copies if it isn't the head's too.
    assert {**vars(of_model), "num_multiplied": 0} == {**vars(facts), "num_multiplied": 0}


@pytest.mark.parametrize(
    ("kind", "library", "exactly"),
    [("adamw", "torch", 8), ("adamw-bf16", "torch", 4), ("adamw-8bit", "bitsandbytes", None)],
)
def test_optimizer_states_are_counted(kind: str, library: str, exactly: int | None) -> None:
    if library != "torch":
        pytest.importorskip(library)
    model = build_model(shape_of(), seed=1)
    optimizer = build_optimizer(
        model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True, kind=kind, library=library
    )
    allocate_state(optimizer)
    tensors = optimizer_tensors(optimizer, plain_parameters(model))
    held = sum(each.nbytes for name, each in tensors.items() if not name.startswith("step."))
    facts = facts_of_model(model, seq_len=SEQ_LEN)
    estimate = estimated_memory(facts, device="cpu", dtype="float32", rows=1, seq_len=SEQ_LEN, optimizer=kind)
    if exactly:
        assert estimate.optimizer == held == exactly * facts.num_trained
    else:  # vectors stay in float32
        assert estimate.optimizer == pytest.approx(held, rel=0.02)


def test_frozen_parameters_cost_their_weight_alone() -> None:
    model = build_model(shape_of(), seed=1)
    whole = facts_of_model(model, seq_len=SEQ_LEN)
    model.requires_grad_(False)
    next(iter(model.blocks()[0].parameters())).requires_grad_()
    frozen = facts_of_model(model, seq_len=SEQ_LEN)
    sizes = {"device": "cuda", "dtype": "bfloat16", "rows": 2, "seq_len": SEQ_LEN}
    before, after = estimated_memory(whole, **sizes), estimated_memory(frozen, **sizes)
    assert after.weights == before.weights
    assert after.gradients == 4 * frozen.num_trained == after.optimizer // 2
    assert frozen.num_trained < whole.num_trained / 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("loss_kernel", "activation_checkpointing", "sizes"),
    [
        ("plain", "none", {}),
        ("plain", "none", {"vocab_size": 4000}),
        ("plain", "none", {"hidden_size": 256, "num_layers": 2}),
        ("plain", "selective", {"num_layers": 6}),
        ("plain", "full", {"num_layers": 6}),
        ("chunked", "none", {}),
    ],
)
def test_the_estimate_is_near_what_is_alive(dtype, loss_kernel, activation_checkpointing, sizes) -> None:
    shape, rows = shape_of(**sizes), 8 if dtype == "float32" else 2
    model = build_model(shape, seed=1)
    model.requires_grad_(True)
    batch = made_up_batch(rows=2 * rows, seq_len=SEQ_LEN, vocab_size=320, device=CPU)
    live = LiveBytes()
    with checkpointed_activations(model.blocks(), activation_checkpointing), live:
        add_gradients(
            model,
            batch,
            micro_batch_rows=rows,
            document_boundaries=True,
            autocast=autocast_of(dtype),
            loss_kernel=loss_kernel,
        )
    estimate = estimated_memory(
        facts_of_model(model, seq_len=SEQ_LEN),
        device="cpu",
        dtype=dtype,
        rows=rows,
        seq_len=SEQ_LEN,
        loss_kernel=loss_kernel,
        activation_checkpointing=activation_checkpointing,
    )
    there_before = estimate.weights + estimate.optimizer
    # Rather too much than too little. bfloat16 copies of layers that compute twice are partly gone by then.
    most = 1.5 if dtype == "bfloat16" and activation_checkpointing != "none" else 1.2
    assert 0.97 < (estimate.total - there_before) / live.peak < most


def test_less_is_less() -> None:
    facts = facts_of_shape(shape_of(vocab_size=50_257, hidden_size=768, num_layers=12), seq_len=1024)

    def total(**options: Any) -> int:
        return estimated_memory(facts, device="cuda", dtype="bfloat16", rows=16, seq_len=1024, **options).total

    assert total(loss_kernel="chunked") < total()
    on_gpu = {"gpu_memory_bytes": 16 * 2**30}
    assert total(loss_kernel="chunked", has_fused_loss=True, **on_gpu) < total(loss_kernel="chunked", **on_gpu)
    assert total(activation_checkpointing="full") < total(activation_checkpointing="selective") < total()
    assert total(optimizer="adamw-8bit") < total(optimizer="adamw-bf16") < total()
    assert total(attention="flex") < total(attention="sdpa")
    assert total(document_boundaries=False) == total(attention="flex")
