"""The search with made-up figures: its arithmetic, its order, its end. The last tests measure for real, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.runlog import RunLog, read_records
from penstock.train import TrainConfig, build_model
from penstock.train.choices import Choices, chosen
from penstock.train.randomness import saved_random_state
from penstock.train.tuning import PROFILES, choice_rows, facts_of_shape, rules
from penstock.train.tuning.cache import cache_path, cached, keep
from penstock.train.tuning.deciding import with_measurements
from penstock.train.tuning.measuring import Measured, Search
from penstock.train.tuning.trials import Trial

from ..conftest import tiny_config

GIB = 2**30
START = Choices(device="cuda", dtype="bfloat16", micro_batch_rows=8, num_threads=1, fused_optimizer=True)
OPEN = frozenset({"attention", "micro_batch_rows", "loss_kernel", "compile"})


class Machine:
    """Speeds and memory by candidate; every trial takes `trial_seconds` of its clock."""

    def __init__(
        self, *, knee: int = 32, memory_rows: int = 10**6, trial_seconds: float = 1.0, **speeds: float
    ) -> None:
        self.knee, self.memory_rows, self.trial_seconds, self.speeds = knee, memory_rows, trial_seconds, speeds
        self.now = 0.0
        self.tried: list[Choices] = []

    def clock(self) -> float:
        return self.now

    def try_out(self, choices: Choices) -> Trial:
        self.now += self.trial_seconds
        self.tried.append(choices)
        allowed = self.memory_rows * (4 if choices.loss_kernel == "chunked" else 1)
        if choices.micro_batch_rows > allowed:
            return Trial(choices=choices, failure="out of memory")
        if choices.attention in self.speeds and self.speeds[choices.attention] == 0:
            return Trial(choices=choices, failure="no such kernel")
        speed = 1000.0 * min(choices.micro_batch_rows, self.knee) * self.speeds.get(choices.attention, 1.0)
        if choices.compile == "blocks":
            speed *= self.speeds.get("blocks", 1.25)
        return Trial(choices=choices, tokens_per_second=speed, first_seconds=8.0, peak_bytes=GIB)

    def search(self, **options: Any) -> Search:
        usual = {"seconds": 90.0, "may_change": OPEN, "attention_kernels": ("sdpa", "flex", "cudnn"), "local_rows": 64}
        sizes = {"memory_bytes": 100 * GIB, "optimizer_bytes": GIB}
        return Search(try_out=self.try_out, clock=self.clock, **{**usual, **sizes, **options})


def test_the_micro_batch_is_doubled_up_to_the_knee() -> None:
    machine = Machine(knee=32)
    found = machine.search().measured(START)
    assert found is not None
    assert found.micro_batch_rows == 32
    assert found.gains["micro_batch_rows"] == pytest.approx(3.0)
    assert "64 rows gain less than 3%" in found.notes["micro_batch_rows"]


def test_memory_ends_the_doubling_and_a_chunked_loss_goes_further() -> None:
    found = Machine(knee=64, memory_rows=16).search().measured(START)
    assert found is not None
    assert (found.micro_batch_rows, found.loss_kernel) == (32, "chunked")
    assert "90%" in found.notes["micro_batch_rows"]
    past_the_knee = Machine(knee=16, memory_rows=16).search().measured(START)
    assert past_the_knee is not None
    assert (past_the_knee.micro_batch_rows, past_the_knee.loss_kernel) == (16, "plain")


def test_the_optimizers_state_counts_though_it_is_not_there_yet() -> None:
    assert Machine().search(optimizer_bytes=89 * GIB).measured(START).micro_batch_rows == 32  # type: ignore[union-attr]
    assert Machine().search(optimizer_bytes=90 * GIB).measured(START).micro_batch_rows == 8  # type: ignore[union-attr]


def test_a_start_that_does_not_fit_is_halved() -> None:
    rows_alone = frozenset({"micro_batch_rows"})
    found = Machine(memory_rows=3).search(may_change=rows_alone).measured(replace(START, micro_batch_rows=16))
    assert found is not None
    assert found.micro_batch_rows == 2
    assert Machine(memory_rows=0).search().measured(START) is None


def test_the_fastest_attention_kernel_is_taken_if_it_gains_enough() -> None:
    fast = Machine(flex=1.5, cudnn=0.0).search().measured(START)
    assert fast is not None
    assert (fast.attention, fast.gains["attention"]) == ("flex", pytest.approx(0.5))
    hardly = Machine(flex=1.005).search().measured(START)
    assert hardly is not None
    assert hardly.attention == "sdpa"
    # It costs nothing to keep, so a gain will do that wouldn't for more rows.
    a_little = Machine(flex=1.02).search().measured(START)
    assert a_little is not None
    assert a_little.attention == "flex"


def test_a_slow_compiler_leaves_time_for_another_kernel_but_not_for_more_rows() -> None:
    machine = Machine(flex=1.5, trial_seconds=40.0)
    found = machine.search(attention_kernels=("sdpa", "flex", "cudnn")).measured(START)
    assert found is not None
    assert [one.attention for one in machine.tried] == ["sdpa", "flex"]
    assert (found.attention, found.micro_batch_rows) == ("flex", 8)
    assert "no time left for cudnn" in found.notes["attention"]


def test_what_is_set_is_not_tried() -> None:
    machine = Machine(flex=2.0)
    found = machine.search(may_change=frozenset()).measured(START)
    assert found is not None
    assert machine.tried == [START]
    assert found.gains == {}


@pytest.mark.parametrize("seconds", [1.0, 7.0, 20.0, 90.0])
def test_the_time_is_kept(seconds: float) -> None:
    machine = Machine(knee=64, trial_seconds=6.0)
    search = machine.search(seconds=seconds)
    found = search.measured(START)
    assert found is not None
    search.with_compiling(found, START, step_seconds=1.0, steps=10**6)
    assert machine.now <= max(seconds, 6.0)
    assert machine.tried


def test_compiling_is_tried_only_where_it_may_pay_back() -> None:
    machine = Machine()
    search = machine.search()
    found = search.measured(START)
    assert found is not None
    before = len(machine.tried)
    short = search.with_compiling(found, START, step_seconds=0.1, steps=10)
    assert short.compile_seconds is None
    assert len(machine.tried) == before
    long = search.with_compiling(replace(found, tokens_per_second=8000.0), START, step_seconds=0.1, steps=10_000)
    assert (long.compile_seconds, long.compile_saved_share) == (8.0, pytest.approx(0.2))
    assert search.with_compiling(long, START, step_seconds=0.1, steps=10_000) is long


def test_where_the_rules_compile_the_trials_do() -> None:
    machine = Machine(knee=16, blocks=1.6, flex=1.2)
    found = machine.search().measured(replace(START, compile="blocks"))
    assert found is not None
    assert [choices.compile for choices in machine.tried] == ["blocks"] * (len(machine.tried) - 1) + ["off"]
    assert (found.attention, found.micro_batch_rows) == ("flex", 16)
    assert (found.compile_seconds, found.compile_saved_share) == (8.0, pytest.approx(1 - 1 / 1.6))
    assert found.tokens_per_second == pytest.approx(16_000 * 1.2)  # without compiling


def test_a_compiler_that_fails_leaves_the_rest_of_the_search() -> None:
    machine = Machine(knee=16)
    try_out = machine.try_out
    machine.try_out = lambda choices: (  # type: ignore[method-assign]
        try_out(choices) if choices.compile == "off" else Trial(choices=choices, failure="no C compiler")
    )
    found = machine.search().measured(replace(START, compile="blocks"))
    assert found is not None
    assert (found.micro_batch_rows, found.compile_saved_share) == (16, -1.0)
    assert found.notes["compile"] == "failed: no C compiler"
    assert decision_with(found, 100_000).choices.compile == "off"


def decision_with(found: Measured, steps: int) -> Any:
    config = TrainConfig(steps=steps, seq_len=1000, batch_rows=8)
    shape = config.model.shape(vocab_size=320, seq_len=1000)
    start = rules(PROFILES["gpu-24gb"], facts_of_shape(shape, seq_len=1000), config)
    return with_measurements(start, found, config, is_from_cache=False)


def test_one_measurement_serves_runs_of_any_length() -> None:
    found = Measured(
        attention="cudnn",
        micro_batch_rows=4,
        loss_kernel="plain",
        tokens_per_second=8000.0,  # a second a step
        gains={"attention": 0.1},
        notes={"attention": "the fastest", "compile": "measured"},
        compile_seconds=10.0,
        compile_saved_share=0.2,
    )
    assert decision_with(found, 40).choices.compile == "off"
    long = decision_with(found, 60)
    assert long.choices.compile == "blocks"
    assert long.gains == {"attention": 0.1, "compile": pytest.approx(0.25)}
    assert decision_with(found, 100_000).choices.compile == "blocks"
    assert long.choices.attention == "cudnn"
    failed = replace(found, compile_seconds=0.0, compile_saved_share=-1.0, notes={"compile": "failed: no compiler"})
    assert decision_with(failed, 100_000).choices.compile == "off"


KEY = {"device": "a card", "rows": 8}
FOUND = Measured(attention="sdpa", micro_batch_rows=2, loss_kernel="plain", tokens_per_second=1.5, gains={"a": 0.1})


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_measured_is_kept_by_key(tmp_path: Path, cache_folder: Path) -> None:
    with RunLog(tmp_path / "run") as log:
        assert cached(KEY, log) is None
        keep(KEY, FOUND, log)
        assert cached(KEY, log) == FOUND
        assert cached({**KEY, "rows": 9}, log) is None
    assert read_records(tmp_path / "run") == []
    assert cache_path(KEY).is_relative_to(cache_folder / "penstock" / "tuning")


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_passed_over_and_written_anew(tmp_path: Path, cache_folder: Path, damage: bytes) -> None:
    with RunLog(tmp_path / "run") as log:
        keep(KEY, FOUND, log)
        cache_path(KEY).write_bytes(damage)
        assert cached(KEY, log) is None
        keep(KEY, FOUND, log)
        assert cached(KEY, log) == FOUND
    assert "passed over" in read_records(tmp_path / "run")[0]["message"]


def test_every_flipped_byte_is_found(tmp_path: Path, cache_folder: Path) -> None:
    with RunLog(tmp_path / "run") as log:
        keep(KEY, FOUND, log)
        whole = cache_path(KEY).read_bytes()
        for place in range(0, len(whole), 7):
            cache_path(KEY).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert cached(KEY, log) in (None, FOUND)  # a space more or less is no damage
        changed = whole.replace(b'"micro_batch_rows": 2', b'"micro_batch_rows": 4')
        cache_path(KEY).write_bytes(changed)
        assert changed != whole
        assert cached(KEY, log) is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path, cache_folder: Path) -> None:
    cache_folder.write_text("a file in the way")
    with RunLog(tmp_path / "run") as log:
        assert cached(KEY, log) is None
        keep(KEY, FOUND, log)
    assert "not kept" in read_records(tmp_path / "run")[-1]["message"]


def measured_run(folder: Path, *overrides: str) -> tuple[Choices, list[dict[str, Any]], Any]:
    settings = ["micro_batch_rows=null", "batch_rows=4", "tune=measure", "tune_seconds=30", *overrides]
    config = tiny_config(*settings)
    model = build_model(config.model.shape(vocab_size=320, seq_len=config.seq_len), seed=1)
    with RunLog(folder) as log:
        choices = chosen(config, model, log)
    return choices, read_records(folder), model


def test_measuring_leaves_no_trace_in_the_run(tmp_path: Path, cache_folder: Path) -> None:
    random_state = saved_random_state()
    choices, records, model = measured_run(tmp_path / "one")
    untouched = build_model(model.shape, seed=1)
    for one, other in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None
    assert saved_random_state() == random_state
    assert [kind for kind in (record["kind"] for record in records) if kind == "trial"]
    assert 4 % choices.micro_batch_rows == 0
    measured = [row for row in choice_rows(records) if row[0] == "micro_batch_rows"]
    assert measured[0][2].endswith("(measured)")


def test_the_table_shows_gains_and_the_latest_of_each_choice() -> None:
    records = [
        {"kind": "choice", "name": "compile", "value": "off", "reason": "too short"},
        {"kind": "choice", "name": "compile", "value": "blocks", "reason": "it pays back", "gain": 0.256},
        {"kind": "event", "message": "none of these"},
        {"kind": "choice", "name": "tf32", "value": True, "reason": "as set"},
    ]
    rows = [("compile", "blocks", "it pays back", "+25.6%"), ("tf32", "yes", "as set", "")]
    assert choice_rows(records) == rows


def test_the_second_run_takes_the_figures_of_the_first(tmp_path: Path, cache_folder: Path) -> None:
    first, _, _ = measured_run(tmp_path / "one")
    second, records, _ = measured_run(tmp_path / "two")
    assert second == first
    assert [record for record in records if record["kind"] == "trial"] == []
    assert any("measured earlier" in str(record.get("reason")) for record in records)
    _, others, _ = measured_run(tmp_path / "three", "tune_cache=false")
    assert [record for record in others if record["kind"] == "trial"]
    _, another, _ = measured_run(tmp_path / "four", "batch_rows=2")
    assert [record for record in another if record["kind"] == "trial"]


def test_a_deterministic_run_measures_nothing(tmp_path: Path, cache_folder: Path) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        measured_run(tmp_path / "one", "deterministic=true")
    _, records, _ = measured_run(tmp_path / "two", "deterministic=true", "tune=auto")
    assert [record for record in records if record["kind"] == "trial"] == []
    assert not cache_folder.exists()
