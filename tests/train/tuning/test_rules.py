"""Rules are pure: any profile, any model, no device."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.train import TrainConfig, load_config
from penstock.train.choices import Choices, halved
from penstock.train.tuning import PROFILES, explain, facts_of_shape, profile_named, rules
from penstock.train.tuning.break_even import Compiling, weighed
from penstock.train.tuning.rules import Decision, memory_of

GPUS = [name for name in PROFILES if name.startswith("gpu")]


def config_of(*overrides: str) -> TrainConfig:
    usual = ["model.num_layers=12", "model.num_heads=6", "model.hidden_size=768", "model.feed_forward_size=2048"]
    return load_config(None, [*usual, "seq_len=1024", "batch_rows=64", "steps=5000", *overrides])


def decided(name: str, *overrides: str, **options: object) -> Decision:
    config = config_of(*overrides)
    shape = config.model.shape(vocab_size=50_257, seq_len=config.seq_len)
    return rules(PROFILES[name], facts_of_shape(shape, seq_len=config.seq_len), config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PROFILES)
def test_every_choice_has_a_reason(name: str) -> None:
    decision = decided(name)
    assert decision.reasons.keys() == vars(decision.choices).keys()
    assert all(decision.reasons.values())


@pytest.mark.parametrize("name", GPUS)
def test_what_is_chosen_fits_or_says_that_it_may_not(name: str) -> None:
    decision = decided(name)
    fits = decision.memory.total <= 0.9 * PROFILES[name].memory_bytes
    assert fits != ("may run out" in decision.reasons["micro_batch_rows"])
    assert 64 % decision.choices.micro_batch_rows == 0


def test_more_memory_is_used_for_larger_pieces_and_less_saving() -> None:
    rows = [decided(name).choices.micro_batch_rows for name in GPUS]
    assert rows[0] < rows[-1] == 64
    largest = decided("gpu-141gb").choices
    assert (largest.loss_kernel, largest.activation_checkpointing, largest.optimizer) == ("chunked", "none", "adamw")
    assert decided("gpu-8gb", "seq_len=8192", "batch_rows=4").choices.loss_kernel == "chunked"


def test_smaller_states_are_the_last_resort() -> None:
    big = ["model.num_layers=36", "model.hidden_size=1536", "model.num_heads=12", "model.feed_forward_size=4096"]
    tight = decided("gpu-16gb", *big, optimizer_library="torch").choices
    assert (tight.optimizer, tight.activation_checkpointing) == ("adamw-bf16", "full")
    assert decided("gpu-24gb", *big).choices.optimizer == "adamw"
    tighter = decided("gpu-12gb", *big, optimizer_library="torchao").choices
    assert (tighter.optimizer, tighter.optimizer_library) == ("adamw-8bit", "torchao")


def test_what_is_set_is_taken() -> None:
    sets = {
        "loss_kernel": "chunked",
        "optimizer": "adamw-bf16",
        "activation_checkpointing": "selective",
        "compile": "whole",
        "attention": "efficient",
        "dtype": "float32",
    }
    for name in ("gpu-141gb", "cpu-8"):
        for key, value in sets.items():
            decision = decided(name, f"{key}={value}")
            assert getattr(decision.choices, key) == value
            assert decision.reasons[key] == "as set"
        assert decided(name, "micro_batch_rows=3").choices.micro_batch_rows == 3
        assert decided(name, "tf32=false").choices.tf32 is False


def test_a_cpu_takes_the_simplest() -> None:
    choices = decided("cpu-8").choices
    expected = ("plain", "none", "adamw", "off", "sdpa", "float32")
    found = (choices.loss_kernel, choices.activation_checkpointing, choices.optimizer)
    assert (*found, choices.compile, choices.attention, choices.dtype) == expected


def test_off_takes_the_simplest_on_a_gpu_too() -> None:
    choices = decided("gpu-6gb", "tune=off").choices
    assert (choices.loss_kernel, choices.compile, choices.activation_checkpointing) == ("plain", "off", "none")
    assert choices.micro_batch_rows == 4  # logits of 1 GiB


def test_precision_follows_the_card() -> None:
    assert decided("gpu-8gb").choices.dtype == "bfloat16"
    assert decided("gpu-16gb").choices.dtype == "float32"  # a T4


def test_documents_are_kept_apart_without_a_dense_mask() -> None:
    assert decided("gpu-24gb").choices.attention == "flex"
    assert decided("gpu-24gb", "document_boundaries=false").choices.attention == "sdpa"
    assert decided("gpu-24gb", attention_kernels=("sdpa",)).choices.attention == "sdpa"
    assert decided("gpu-24gb", "deterministic=true").choices.attention == "sdpa"


def test_a_head_that_is_not_one_matrix_keeps_the_plain_loss() -> None:
    assert decided("gpu-6gb", is_sharded=True).choices.loss_kernel == "plain"


def test_compiling_pays_back_in_long_runs_only() -> None:
    assert decided("gpu-141gb", "steps=20").choices.compile == "off"
    assert decided("gpu-141gb", "steps=5000").choices.compile == "blocks"
    assert decided("gpu-141gb", "steps=500000").choices.compile == "blocks"
    assert decided("gpu-2gb", "steps=500000").choices.compile == "off"  # older than the compiler
    assert decided("gpu-141gb", "steps=500000", "deterministic=true").choices.compile == "off"
    by_passes = load_config(None, ["epochs=3"])
    shape = by_passes.model.shape(vocab_size=300, seq_len=by_passes.seq_len)
    facts = facts_of_shape(shape, seq_len=by_passes.seq_len)
    assert rules(PROFILES["gpu-24gb"], facts, by_passes).choices.compile == "off"


@given(
    step_seconds=st.floats(1e-4, 60), steps=st.integers(1, 10**6), cost=st.floats(0.1, 500), share=st.floats(-1, 0.9)
)
def test_break_even(step_seconds: float, steps: int, cost: float, share: float) -> None:
    compiling = Compiling(way="blocks", cost_seconds=cost, saved_share=share)
    way, reason = weighed(compiling, step_seconds=step_seconds, steps=steps)
    assert (way == "blocks") == (share * step_seconds * steps > cost)
    assert f"{steps:,} steps" in reason


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(GPUS),
    rows=st.integers(1, 96),
    seq_len=st.sampled_from([128, 1024, 8192]),
    layers=st.integers(1, 40),
)
def test_any_model_on_any_card(name: str, rows: int, seq_len: int, layers: int) -> None:
    config = config_of(f"batch_rows={rows}", f"seq_len={seq_len}", f"model.num_layers={layers}")
    facts = facts_of_shape(config.model.shape(vocab_size=50_257, seq_len=seq_len), seq_len=seq_len)
    decision = rules(PROFILES[name], facts, config)
    assert rows % decision.choices.micro_batch_rows == 0
    assert decision.memory == memory_of(decision.choices, facts, config, PROFILES[name])
    assert decision == rules(PROFILES[name], facts, config)


def test_halving_ends_at_one_row() -> None:
    choices = Choices(device="cuda", dtype="bfloat16", micro_batch_rows=7, num_threads=1, fused_optimizer=True)
    rows = []
    current: Choices | None = choices
    while current is not None:
        rows.append(current.micro_batch_rows)
        current = halved(current)
    assert rows == [7, 4, 2, 1]


@pytest.mark.parametrize("name", PROFILES)
def test_explain_answers_for_machines_that_are_not_here(name: str) -> None:
    config = config_of()
    rows = explain(PROFILES[name], config, config.model.shape(vocab_size=50_257, seq_len=1024))
    assert {"device", "micro_batch_rows", "compile", "memory", "workers"} <= {row[0] for row in rows}
    assert all(len(row) == 3 and all(isinstance(cell, str) and cell for cell in row) for row in rows)


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="gpu-24gb"):
        profile_named("gpu-25gb")


def test_rules_import_no_torch() -> None:
    code = "import sys, penstock.train.tuning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
