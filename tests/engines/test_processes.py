"""Worker processes: order, errors, death on either side, and nothing left running."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines import can_fork, drawn_beside, run_side_by_side, run_units_in_processes, settled_objects
from penstock.errors import InputError, WorkerDiedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes are forked on Linux only")


@pytest.fixture(autouse=True)
def _nobody_left_behind() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def run(units: Any, workers: int = 2, **steps: Any) -> Iterator[Any]:
    functions = {"read": lambda u: u, "encode": lambda u, text: text, "write": lambda u, tokens: tokens, **steps}
    return run_units_in_processes(units, workers=workers, **functions)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_come_in_unit_order_and_each_stage_gets_what_the_one_before_gave(workers: int, count: int):
    results = run(
        range(count),
        workers,
        read=lambda unit: f"text {unit}",
        encode=lambda unit, text: (unit, text, "tokens"),
        write=lambda unit, tokens: (*tokens, "written", unit),
    )
    assert list(results) == [(n, (n, f"text {n}", "tokens", "written", n)) for n in range(count)]


def test_the_work_is_done_by_as_many_other_processes_as_asked_for():
    def slow(unit: int) -> int:
        time.sleep(0.02)
        return os.getpid()

    workers = {pid for _, pid in run(range(20), 3, read=slow)}
    assert len(workers) == 3
    assert os.getpid() not in workers


def test_each_worker_gets_its_units_in_ascending_order():
    seen: list[int] = []  # each worker's own, inherited empty

    def note(unit: int) -> tuple[int, list[int]]:
        seen.append(unit)
        return os.getpid(), list(seen)

    histories = {pid: history for _, (pid, history) in run(range(40), 2, read=note)}
    assert sorted(unit for history in histories.values() for unit in history) == list(range(40))
    assert all(history == sorted(history) for history in histories.values())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("parts", [0, 1, 2, 9])
def test_parts_that_are_drawn_ahead_come_in_order(workers: int, parts: int):
    results = run(
        range(20),
        workers,
        read=lambda unit: ((unit, number) for number in range(parts)),
        ahead=lambda part: (*part, "ahead"),
        encode=lambda unit, drawn: list(drawn),
    )
    assert list(results) == [(n, [(n, number, "ahead") for number in range(parts)]) for n in range(20)]


def test_parts_that_nobody_took_are_passed_over():
    results = run(
        range(20), 1, read=lambda unit: iter([unit] * 9), ahead=lambda part: part, encode=lambda _, drawn: next(drawn)
    )
    assert list(results) == [(unit, unit) for unit in range(20)]


@pytest.mark.parametrize("stage", ["read", "ahead", "encode", "write"])
@pytest.mark.parametrize("failing", [(0, 0), (3, 8), (19, 4)])
def test_an_error_ahead_is_raised_at_its_unit(stage: str, failing: tuple[int, int]):
    def step(name: str, unit: int, number: int) -> tuple[int, int]:
        if (name, unit, number) == (stage, *failing):
            raise InputError(f"part {number} of {unit} is bad", hint="mend it")
        return unit, number

    results = run(
        range(20),
        1,
        read=lambda unit: (step("read", unit, number) for number in range(9)),
        ahead=lambda part: step("ahead", *part),
        encode=lambda unit, drawn: [step("encode", *part) for part in drawn],
        write=lambda unit, tokens: [step("write", *part) for part in tokens],
    )
    done: list[Any] = []
    with pytest.raises(InputError, match="is bad"):
        done.extend(results)
    assert done == [(unit, [(unit, number) for number in range(9)]) for unit in range(failing[0])]


@pytest.mark.parametrize("stage", ["read", "encode", "write"])
@pytest.mark.parametrize("failing", [0, 7, 29])
def test_an_error_is_raised_at_its_unit_with_message_hint_and_trace(stage: str, failing: int):
    def step(unit: int, *_: Any) -> int:
        if unit == failing:
            raise InputError(f"unit {unit} is bad", hint="mend it")
        return unit

    finished: list[int] = []
    with pytest.raises(InputError, match=f"unit {failing} is bad") as caught:
        finished.extend(unit for unit, _ in run(range(30), **{stage: step}))
    assert caught.value.hint == "mend it"
    assert "in a worker process" in "".join(caught.value.__notes__)
    assert finished == list(range(len(finished)))
    assert len(finished) <= failing


def test_an_error_that_cannot_be_pickled_is_still_told():
    class Stubborn(Exception):  # noqa: N818
        def __reduce__(self) -> Any:
            raise TypeError("not me")

    def fail(unit: int) -> int:
        raise Stubborn("what happened")

    with pytest.raises(RuntimeError, match="what happened"):
        list(run(range(3), read=fail))


def test_an_error_of_the_walk_is_raised():
    def units() -> Iterator[int]:
        yield 1
        raise InputError("the folder vanished", hint="look for it")

    with pytest.raises(InputError, match="vanished"):
        list(run(units()))


def test_a_worker_that_is_killed_ends_the_run_with_a_clear_error():
    def die(unit: int) -> int:
        if unit == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return unit

    with pytest.raises(WorkerDiedError, match="killed by signal 9") as caught:
        list(run(range(50), read=die))
    assert "--workers" in caught.value.hint


def test_leaving_early_stops_the_workers():
    results = run(range(1000), read=lambda unit: time.sleep(0.01) or unit)
    assert next(results)[0] == 0
    results.close()  # type: ignore[attr-defined]


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path):
    """They sleep for an hour in the middle of their work, and have to go all the same."""
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from penstock.engines import run_units_in_processes\n"
        "def read(unit):\n"
        "    Path(sys.argv[1], str(os.getpid())).touch()\n"
        "    time.sleep(3600)\n"
        "same = lambda unit, value: value\n"
        "list(run_units_in_processes(range(4), read=read, encode=same, write=same, workers=2))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        while len(list(tmp_path.iterdir())) < 2:
            assert parent.poll() is None
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and _is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestSideBySide:
    @pytest.mark.parametrize("count", [0, 1, 2, 5])
    def test_the_first_here_the_others_elsewhere_results_in_order(self, count: int):
        results = run_side_by_side(range(count), lambda unit: (unit * unit, os.getpid()))
        assert [square for square, _ in results] == [unit * unit for unit in range(count)]
        assert len({pid for _, pid in results}) == count
        assert [pid == os.getpid() for _, pid in results] == [unit == 0 for unit in range(count)]

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_an_error_anywhere_is_raised_and_nobody_goes_on(self, failing: int):
        def work(unit: int) -> int:
            if unit == failing:
                raise InputError("unit refused", hint="do otherwise")
            return unit if unit == 0 else time.sleep(0.2 * unit) or unit

        with pytest.raises(InputError, match="unit refused") as caught:
            run_side_by_side(range(3), work)
        assert caught.value.hint == "do otherwise"

    def test_a_process_that_is_killed_ends_it_with_a_clear_error(self):
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            run_side_by_side(range(2), lambda unit: os.kill(os.getpid(), signal.SIGKILL) if unit else None)


def test_no_fork_beside_a_thread():
    import threading

    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert not can_fork()
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize("count", [0, 1, 500])
def test_items_drawn_beside_are_the_same_in_order_and_from_another_process(count: int):
    with drawn_beside((number, os.getpid(), b"x" * 4096) for number in range(count)) as items:
        drawn = list(items)
    assert [number for number, *_ in drawn] == list(range(count))
    assert os.getpid() not in {pid for _, pid, _ in drawn}


def test_drawing_beside_goes_on_while_nobody_takes(tmp_path: Path):
    """Far more than a pipe holds, so that whoever waits for the reader would never come to the end."""

    def items() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 2**16
        (tmp_path / "end").touch()

    with drawn_beside(items()) as drawn:
        deadline = time.monotonic() + 30
        while not (tmp_path / "end").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "end").exists()
        assert sum(map(len, drawn)) == 2**22


def test_a_walk_that_began_here_goes_on_beside():
    numbers = iter(range(5))
    begun = next(numbers)
    with drawn_beside(numbers) as rest:
        assert [begun, *rest] == list(range(5))


def test_an_error_of_what_is_drawn_beside_is_raised_after_what_came_before_it():
    def items() -> Iterator[int]:
        yield 1
        raise InputError("the folder vanished", hint="look for it")

    with drawn_beside(items()) as drawn:
        assert next(drawn) == 1
        with pytest.raises(InputError, match="vanished"):
            next(drawn)


def test_an_item_that_cannot_travel_is_an_error_and_not_missing():
    with drawn_beside([1, lambda: None, 3]) as drawn:
        assert next(drawn) == 1
        with pytest.raises(RuntimeError, match="lambda"):
            next(drawn)


def test_who_draws_beside_and_is_killed_is_told():
    def items() -> Iterator[int]:
        yield 1
        time.sleep(0.2)  # until that is sent
        os.kill(os.getpid(), signal.SIGKILL)

    with drawn_beside(items()) as drawn, pytest.raises(WorkerDiedError, match="killed by signal 9"):
        list(drawn)


def test_leaving_early_stops_the_drawing():
    def items() -> Iterator[int]:
        yield 1
        time.sleep(3600)

    with drawn_beside(items()) as drawn:
        assert next(drawn) == 1


def test_settled_objects_are_collected_again_afterwards():
    before = gc.get_freeze_count()
    with settled_objects():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0
