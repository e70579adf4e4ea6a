"""Two runs compared by their records: what holds, what doesn't, and what can't be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, InputError
from penstock.report.comparison import Comparison, HeldOut, Rescored, Score, Side, compare_runs
from penstock.report.comparison_page import render_comparison_page
from penstock.report.comparison_text import setting_rows, speed_rows, spread_sentence, verdict_line
from penstock.report.speed import account_of, gpu_activity, speed_of, steady_steps

from .conftest import all_payloads, completed_records

WriteRun = Callable[..., Path]


def never(sides: Sequence[Side]) -> Rescored:
    raise AssertionError("the records were enough")


def records_with(*, bits: float = 2.0, rate: float = 1.0, **config: Any) -> list[dict[str, Any]]:
    """A completed run that ended with these bits per byte, its steps `rate` times as fast."""
    records = completed_records()
    records[0]["config"] |= {"seq_len": 512, "eval_rows": 64, **config}
    for record in records:
        if record["kind"] == "evaluation":
            record["bits_per_byte"] = bits
        if record["kind"] == "step":
            record["seconds"] /= rate
    return records


@pytest.fixture
def compared(run_of: WriteRun) -> Callable[..., Comparison]:
    """Writes runs and compares them: the first two, and the rest as seeds."""

    def compare(*runs: list[dict[str, Any]], **options: Any) -> Comparison:
        folders = [run_of(records, name=f"run-{number}") for number, records in enumerate(runs)]
        return compare_runs(folders[0], folders[1], seeds=folders[2:], rescore=options.pop("rescore", never), **options)

    return compare


@pytest.mark.parametrize(
    ("after", "held"), [(2.0, True), (1.5, True), (2.099, True), (2.11, False), (math.nan, False), (3.0, False)]
)
def test_quality_holds_within_the_threshold(compared, after, held):
    found = compared(records_with(), records_with(bits=after))
    assert found.held is held
    assert verdict_line(found).startswith("quality held" if held else "quality not held")
    json.dumps(found.as_dict(), allow_nan=False)


def test_threshold_is_in_percent(compared):
    assert not compared(records_with(), records_with(bits=2.09), threshold_percent=4).held


@pytest.mark.parametrize("threshold", [-1.0, math.nan, math.inf])
def test_a_threshold_that_is_none_is_refused(compared, threshold):
    with pytest.raises(ConfigError, match="threshold"):
        compared(records_with(), records_with(), threshold_percent=threshold)


def test_the_gain_stands_beside_it(compared):
    found = compared(records_with(), records_with(rate=2))
    assert found.tokens_per_second_ratio == pytest.approx(2)
    assert "2.00 times the tokens per second" in verdict_line(found)
    words = {row[0]: row for row in speed_rows(found)}
    assert words["tokens/s, steady state"][3] == "2.00x"
    assert {"data stall", "command to first step", "peak GPU memory", "whole run"} <= words.keys()


def test_settings_that_differ_are_listed(compared):
    found = compared(records_with(learning_rate=1e-3, added=False), records_with(learning_rate=2e-3))
    assert setting_rows(found) == [("learning_rate", "0.001", "0.002")]


def test_spread_is_unknown_without_seeds(compared):
    found = compared(records_with(), records_with(bits=2.05))
    assert found.spread is None
    assert found.beyond_spread is None
    assert "unknown" in spread_sentence(found)


def test_seeds_tell_chance_from_change(compared):
    """Standard deviation 0.02 in both groups of two, so 0.02 of their means' difference too."""
    wobble = 0.02 / math.sqrt(2)

    def four(difference: float) -> list[list[dict[str, Any]]]:
        return [
            records_with(bits=2.0 - wobble, seed=1, kind="a"),
            records_with(bits=2.0 + difference - wobble, seed=1, kind="b"),
            records_with(bits=2.0 + wobble, seed=2, kind="a"),
            records_with(bits=2.0 + difference + wobble, seed=2, kind="b"),
        ]

    found = compared(*four(0.03))
    assert (found.before_bits, found.after_bits) == (pytest.approx(2.0), pytest.approx(2.03))
    assert found.spread is not None
    assert (found.spread.runs_before, found.spread.runs_after) == (2, 2)
    assert found.spread.bits_per_byte == pytest.approx(0.02)
    assert found.spread.of_difference == pytest.approx(0.02)
    assert found.beyond_spread is False


def test_a_difference_beyond_the_spread_is_said(compared):
    runs = [
        records_with(bits=2.000, seed=1, kind="a"),
        records_with(bits=2.060, seed=1, kind="b"),
        records_with(bits=2.001, seed=2, kind="a"),
    ]
    found = compared(*runs)
    assert found.held
    assert found.beyond_spread is True
    assert "more than chance" in spread_sentence(found)


def test_a_seed_run_of_neither_kind_is_refused(compared):
    with pytest.raises(ConfigError, match=r"run-2 is no rerun.*batch_rows"):
        compared(records_with(), records_with(), records_with(seed=7, batch_rows=99))


def test_a_seed_run_with_the_same_seed_is_refused(compared):
    with pytest.raises(ConfigError, match="has seed 42, which another run"):
        compared(records_with(), records_with(lr=1), records_with(lr=1))


def test_other_rows_are_scored_again(compared):
    def rescore(sides: Sequence[Side]) -> Rescored:
        scores = tuple(Score(bits_per_byte=bits, loss=3.0, step=200) for bits in (2.0, 3.0))
        return Rescored(scores=scores, documents=12, tokenizers_differ=True, seq_len=512)

    found = compared(records_with(), records_with(eval_rows=32), rescore=rescore)
    assert not found.held
    assert found.after_bits == 3.0
    page = render_comparison_page(found)
    assert "scored again on 12 documents" in page
    assert "losses per token don&#x27;t compare" in page


def test_what_two_runs_were_scored_on_differs_in_words():
    one = HeldOut(
        digests=("ab" * 32,), split="val", seq_len=64, pack="concat", overlap=0, overlap_loss=False, boundaries=True,
        rows=None, tokens=512.0,
    )  # fmt: skip
    another = replace(one, boundaries=False, rows=8, tokens=164.0)
    assert one.differences(another) == ["boundaries True and False", "rows all and 8", "tokens 512 and 164"]
    mixed = replace(one, digests=("ab" * 32, "cd" * 32))
    assert one.differences(mixed) == ["digests abababababab and abababababab + cdcdcdcdcdcd"]


def without(records: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] not in kinds]


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (without(records_with(), "end"), "isn't finished: its status is 'interrupted' after step 200 of 200"),
        (without(records_with(), "evaluation"), "has no held-out evaluation"),
        (without(records_with(), "data"), "has no held-out evaluation"),
        ([{"kind": "event", "message": "x"}], "isn't finished"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_runs_that_cannot_be_compared_are_refused_by_name(compared, spoilt, message, place):
    runs = [records_with(), records_with()]
    runs[place] = spoilt
    with pytest.raises(InputError, match=message) as met:
        compared(*runs)
    assert f"run-{place}" in met.value.message
    assert met.value.hint


def test_a_first_run_without_quality_is_refused(compared):
    with pytest.raises(InputError, match="no quality to hold"):
        compared(records_with(bits=math.nan), records_with())


def test_page_holds_no_script_whatever_the_records_say(run_of):
    for number, payload in enumerate(all_payloads()[::20]):
        before = records_with(note=payload, **{payload: "x"})
        after = records_with(note="y")
        folders = [run_of(before, name=f"a{number}"), run_of(after, name=f"b{number}")]
        page = render_comparison_page(compare_runs(*folders, rescore=never))
        body = page.partition("</style>")[2].lower()
        assert "<script" not in body
        assert "<img" not in body
        assert "<iframe" not in body
        assert "default-src &#x27;none&#x27;" in page


def test_steady_steps_leave_out_the_first_of_every_start():
    def step(number: int) -> dict[str, Any]:
        return {"kind": "step", "step": number, "seconds": 1.0, "tokens": 10}

    first = [{"kind": "start"}, *(step(number) for number in range(1, 9))]
    again = [{"kind": "start"}, *(step(number) for number in range(7, 12))]
    assert [one["step"] for one in steady_steps([*first, *again])] == [4, 5, 6, 10, 11]
    assert len(steady_steps(first[:3])) == 2, "a run too short to leave any out keeps all"


def test_speed_counts_what_the_records_say():
    records = completed_records()
    speed = speed_of(records)
    steps = [one for one in records if one["kind"] == "step"][3:]
    assert speed.tokens_per_second == pytest.approx(
        sum(one["tokens"] for one in steps) / sum(one["seconds"] for one in steps)
    )
    assert speed.mfu_percent is None, "nothing says what a step costs"
    for place, one in enumerate(steps):
        one |= {"mfu_percent": 40.0 if place % 2 else 50.0, "seconds": 1.0}
    assert speed_of(records).mfu_percent == pytest.approx(45, abs=0.1)


def test_account_adds_up():
    account = account_of(completed_records())
    shares = account.shares()
    assert sum(shares.values()) == pytest.approx(100)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert account.saves == pytest.approx(2 * 0.41)
    assert account.evaluations == pytest.approx(8 * 0.6)
    assert account_of([]).training_seconds is None


def test_gpu_activity_is_the_mean_of_the_samples():
    samples = [{"kind": "hardware", "gpu": [{"index": 0, "sm_percent": value}]} for value in (50, 70)]
    assert gpu_activity([*samples, {"kind": "hardware", "gpu": "junk"}]) == {"sm_percent": 60}
