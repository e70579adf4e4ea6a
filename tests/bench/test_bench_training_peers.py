"""The peers of `bench train` train what we train: the same function of the same weights, from the same tokens."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.processes import Outcome
from penstock.bench.train import Case, Data, rows_of, shape_of, subjects_of, tuned_arguments, usual_ratios
from penstock.train.shape import ModelShape

torch = pytest.importorskip("torch")

SHAPE = ModelShape(
    vocab_size=100,
    padded_vocab_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_size=32,
    feed_forward_size=48,
    max_positions=24,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 100, 4000).astype("<u2").tobytes())
    return str(path)


def test_transformers_computes_our_function():
    transformers = pytest.importorskip("transformers")
    from penstock.bench.training_peers import llama_config
    from penstock.train.model import build_model

    ours = build_model(SHAPE, seed=1)
    theirs = transformers.LlamaForCausalLM(llama_config(asdict(SHAPE))).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(0, 100, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-5)


def test_the_plain_loop_computes_our_function():
    from penstock.bench.training_peers import _plain_llama
    from penstock.train.model import build_model

    ours, theirs = build_model(SHAPE, seed=1), _plain_llama(asdict(SHAPE))
    weights = ours.state_dict()
    mapped = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
    }
    state = {mine: weights[its] for mine, its in mapped.items()}
    for layer in range(SHAPE.num_layers):
        get = lambda name, at=layer: weights[f"model.layers.{at}.{name}.weight"]  # noqa: E731
        state |= {
            f"blocks.{layer}.norm_1.weight": get("input_layernorm"),
            f"blocks.{layer}.norm_2.weight": get("post_attention_layernorm"),
            f"blocks.{layer}.qkv.weight": torch.cat([get(f"self_attn.{part}_proj") for part in "qkv"]),
            f"blocks.{layer}.out.weight": get("self_attn.o_proj"),
            f"blocks.{layer}.gate_up.weight": torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            f"blocks.{layer}.down.weight": get("mlp.down_proj"),
        }
    theirs.load_state_dict(state)
    ids = torch.randint(0, 100, (2, 25))
    with torch.no_grad():
        logits = ours(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(theirs(ids[:, :-1], ids[:, 1:]), loss, rtol=1e-4, atol=1e-5)


def common(tokens: str, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "dtype": "<u2", "seq_len": 16, "batch_size": 2, "steps": 4, "warm_up_steps": 2, **more}


def test_the_plain_loop_reports(tokens):
    from penstock.bench.training_peers import plain_loop_steps

    report = plain_loop_steps(**common(tokens, shape=asdict(SHAPE), learning_rate=1e-3))
    assert report["tokens_per_second"] > 0
    assert report["steps_timed"] == 2
    assert math.isfinite(report["final_loss"])
    assert report["first_step_seconds"] > 0


def test_trainer_reports(tokens):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from penstock.bench.training_peers import trainer_steps

    report = trainer_steps(**common(tokens, shape=asdict(SHAPE), arguments={"learning_rate": 1e-3}))
    assert report["tokens_per_second"] > 0
    assert 0 <= report["data_share_percent"] <= 100


def test_trainer_with_peft_reports(tokens, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    from penstock.bench.training_peers import peft_steps, write_base_model

    write_base_model(shape=asdict(SHAPE), out=str(tmp_path / "base"))
    report = peft_steps(**common(tokens, base=str(tmp_path / "base"), rank=2, arguments={}))
    assert report["tokens_per_second"] > 0
    assert report["mfu_percent"] is None


def case(*, has_gpu: bool) -> Case:
    return Case(preset="tiny", seq_len=32, batch_size=4, steps=6, warm_up_steps=2, has_gpu=has_gpu, workers=1)


DATA = Data(store="store", tokens="tokens.bin", dtype="<u2", vocab_size=1000)


def test_all_sides_are_told_the_same_sizes():
    subjects = subjects_of(case(has_gpu=True), DATA)
    shapes = [dict(subject.settings["shape"]) for subject in subjects if "shape" in subject.settings]
    assert len(shapes) == 3
    assert all(shape == shape_of(case(has_gpu=True), DATA) for shape in shapes)
    assert shapes[0]["padded_vocab_size"] == 1024
    ours = [subject.settings["overrides"] for subject in subjects if "overrides" in subject.settings]
    assert all("seq_len=32" in overrides and "batch_rows=4" in overrides for overrides in ours)


def test_trainer_is_tuned_for_the_device():
    assert tuned_arguments(case(has_gpu=True))["bf16"] is True
    assert "bf16" not in tuned_arguments(case(has_gpu=False))


def test_promises_are_judged_on_a_gpu_alone():
    subjects = {subject.name: subject for subject in subjects_of(case(has_gpu=True), DATA)}
    for device, promised in (("cpu", False), ("NVIDIA H200", True)):
        outcomes = {
            name: Outcome(subject=subject, reports=[{"tokens_per_second": 10.0, "teraflops": 1.0, "device": device}])
            for name, subject in subjects.items()
        }
        ratios = usual_ratios(rows_of(outcomes), outcomes)
        assert any(each.required for each in ratios) is promised
