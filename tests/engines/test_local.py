"""The local engine: order, errors, the bound on units in flight, and nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.engines import run_units
from penstock.engines.local import UNITS_WAITING


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    assert engine_threads() == []


class WorkError(Exception):
    """An error of the work itself."""


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_results_come_in_unit_order_and_each_stage_gets_what_the_one_before_gave(workers: int):
    results = run_units(
        range(100),
        read=lambda unit: f"text {unit}",
        encode=lambda unit, text: (unit, text, "tokens"),
        write=lambda unit, tokens: (*tokens, "written", unit),
        workers=workers,
    )
    assert list(results) == [(n, (n, f"text {n}", "tokens", "written", n)) for n in range(100)]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_order_holds_when_later_units_are_encoded_first(workers: int):
    """Unit 0's encoder waits until the others have been: it can only pass if they overtake it."""
    overtaken = threading.Event()

    def encode(unit: int, text: int) -> int:
        if unit == 1:
            overtaken.set()
        elif unit == 0:
            assert overtaken.wait(timeout=30), "unit 1 was never encoded while unit 0 was"
        return text

    results = run_units(range(8), read=lambda u: u, encode=encode, write=lambda u, tokens: tokens, workers=workers)
    assert list(results) == [(n, n) for n in range(8)]


def test_no_units_give_no_results():
    assert list(run_units([], read=repr, encode=lambda u, t: t, write=lambda u, t: t, workers=2)) == []


@pytest.mark.parametrize("stage", ["read", "encode", "write"])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("failing", [0, 7, 199])
def test_an_error_is_raised_at_its_unit_and_stops_the_rest(stage: str, workers: int, failing: int):
    started: list[int] = []

    def step(name: str, unit: int) -> int:
        if name == "read":
            started.append(unit)
        if name == stage and unit == failing:
            raise WorkError(f"{name} {unit}")
        return unit

    results = run_units(
        range(200),
        read=lambda unit: step("read", unit),
        encode=lambda unit, text: step("encode", text),
        write=lambda unit, tokens: step("write", tokens),
        workers=workers,
    )
    finished: list[int] = []
    with pytest.raises(WorkError, match=f"^{stage} {failing}$"):
        finished.extend(unit for unit, _ in results)
    assert engine_threads() == []
    # `extend` keeps what it was given before the error: exactly the units ahead of the failing one.
    assert finished == list(range(failing))
    assert len(started) <= failing + workers + UNITS_WAITING


def test_an_error_while_units_are_listed_is_raised_after_the_units_before_it():
    def units() -> Iterator[int]:
        yield from range(3)
        raise WorkError("listing")

    with pytest.raises(WorkError, match="listing"):
        list(run_units(units(), read=lambda u: u, encode=lambda u, t: t, write=lambda u, t: t, workers=2))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_units_in_flight_are_bounded_and_the_bound_is_reached(workers: int):
    lock = threading.Lock()
    in_flight, most = 0, 0

    def units() -> Iterator[int]:
        nonlocal in_flight, most
        for unit in range(60):
            with lock:
                in_flight += 1
                most = max(most, in_flight)
            yield unit

    for _ in run_units(units(), read=lambda u: u, encode=lambda u, t: t, write=lambda u, t: t, workers=workers):
        with lock:
            in_flight -= 1
    assert most == workers + UNITS_WAITING
    assert in_flight == 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_reader_one_writer_and_at_most_workers_encoders_run_at_once(workers: int):
    lock = threading.Lock()
    running = {"read": 0, "encode": 0, "write": 0}
    most = dict(running)

    def step(name: str, value: int) -> int:
        with lock:
            running[name] += 1
            most[name] = max(most[name], running[name])
        sum(range(2000))
        with lock:
            running[name] -= 1
        return value

    results = run_units(
        range(120),
        read=lambda unit: step("read", unit),
        encode=lambda unit, text: step("encode", text),
        write=lambda unit, tokens: step("write", tokens),
        workers=workers,
    )
    assert len(list(results)) == 120
    assert most["read"] == most["write"] == 1
    assert most["encode"] <= workers


def test_a_consumer_that_stops_early_leaves_nothing_running():
    read: list[int] = []

    def note(unit: int) -> int:
        read.append(unit)
        return unit

    results = run_units(range(10_000), read=note, encode=lambda u, t: t, write=lambda u, t: t, workers=2)
    assert next(results) == (0, 0)
    results.close()
    assert engine_threads() == []
    assert len(read) <= 1 + 2 + UNITS_WAITING
