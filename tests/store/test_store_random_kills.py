"""`penstock prepare` killed at random times and before every change of the disk, workers and recovery included."""

from __future__ import annotations

import random
import signal
import statistics
from collections.abc import Callable

import pytest

from .samples import spread
from .trials import Preparation, Trials, check_refusal

Preparations = dict[str, Preparation]


@pytest.mark.torture(lane="A")
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_killed_at_random_times(
    preparations: Preparations, workers: int, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    """Each trial is killed once, twice or three times in a row, then left alone."""
    chance = random.Random(workers)
    typical = {
        name: statistics.median(_undisturbed_seconds(each, workers) for _ in range(3))
        for name, each in preparations.items()
    }
    kills, trials, wanted = 0, Trials(), scale(test=17, torture=334)
    while kills < wanted and trials.count < 5 * wanted:
        name = chance.choice(list(preparations))
        preparation = preparations[name]
        with trials.trial(f"trial {trials.count} of {workers} workers"):
            preparation.fresh()
            for _ in range(chance.choice([1, 1, 2, 3])):
                after = chance.uniform(0, typical[name])
                answer = preparation.run("--workers", workers, signal=signal.SIGKILL, after=after, count=False)
                assert answer["left"] == [], "processes outlived the kill by 5 s"
                if answer["status"] != -signal.SIGKILL:
                    assert answer["status"] == 0, answer["stderr"]
                    trials.note("done before")
                    break
                kills += 1
                before = len(preparation.goldens) - 1
                trials.note("after the commit" if preparation.check_versions() > before else "before the commit")
                preparation.check_old_files()
            facts = preparation.check_rerun("--workers", workers)
            if facts["units_taken_over"]:
                trials.note("took units over")
    torture_figures(
        lane="A", case="SIGKILL at random times, up to three in a row", trials=kills, failures=len(trials.failures),
        random=True, workers=[1, 2, 4], reruns=trials.count, **trials.seen,
    )  # fmt: skip
    assert trials.failures == []
    assert kills >= wanted


def _undisturbed_seconds(preparation: Preparation, workers: int) -> float:
    preparation.fresh()
    answer = preparation.run("--workers", workers, count=False)
    assert answer["status"] == 0, answer["stderr"]
    seconds: float = answer["seconds"]
    return seconds


def _operations(preparation: Preparation, workers: int) -> list[tuple[str, str, bool]]:
    """(operation, path, whether a worker makes it) of each change of the disk, undisturbed."""
    preparation.fresh()
    answer = preparation.run("--workers", workers)
    assert answer["status"] == 0, answer["stderr"]
    operations = [(operation, path, in_worker) for operation, path, in_worker in answer["operations"]]
    assert len(operations) > 50
    return operations


@pytest.mark.torture(lane="A")
@pytest.mark.parametrize("name", ["first", "update"])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.torture(lane="A", sample=False)), 2])
def test_killed_before_every_change_of_the_disk_and_again_during_recovery(
    preparations: Preparations,
    name: str,
    workers: int,
    scale: Callable[..., int],
    torture_figures: Callable[..., None],
):
    preparation, chance = preparations[name], random.Random(name)
    operations = _operations(preparation, workers)
    commit = [operation for operation, _, _ in operations].index("link") + 1
    in_workers = [number for number, (_, _, in_worker) in enumerate(operations, 1) if in_worker]
    places = spread(max(2, scale(test=2, torture=len(operations))), over=len(operations))
    trials = Trials()
    for place in sorted({*places, in_workers[len(in_workers) // 2], commit, commit + 1}):
        with trials.trial(f"operation {place}, {operations[place - 1]}"):
            preparation.fresh()
            answer = preparation.run("--workers", workers, kill_at=place)
            assert answer["status"] == -signal.SIGKILL
            assert answer["left"] == []
            trials.note("in a worker" if answer["operations"][-1][2] else "in the parent")
            versions = preparation.check_versions()
            assert versions == len(preparation.goldens) - (place <= commit)
            preparation.check_old_files()
            again = preparation.run("--workers", workers, kill_at=chance.randint(1, len(operations)))
            assert again["status"] in (0, -signal.SIGKILL)  # a recovery has fewer operations
            trials.note("killed again" if again["status"] else "recovered at once")
            preparation.check_versions()
            preparation.check_rerun("--workers", workers)
    torture_figures(
        lane="A", case="SIGKILL before each change of the disk, and again at one of the recovery", trials=trials.count,
        failures=len(trials.failures), exhaustive=len(places) == len(operations), workers=[1, 2], **trials.seen,
    )  # fmt: skip
    assert trials.failures == []
    assert {"in a worker", "in the parent"} <= set(trials.seen)


@pytest.mark.torture(lane="A")
def test_a_killed_worker_ends_the_command_with_a_word(
    preparations: Preparations, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    preparation, trials = preparations["update"], Trials()
    operations = _operations(preparation, 2)
    places = [number for number, (_, _, in_worker) in enumerate(operations, 1) if in_worker]
    for place in places[:: max(1, len(places) // scale(test=3, torture=len(places)))]:
        with trials.trial(f"operation {place}"):
            preparation.fresh()
            answer = preparation.run("--workers", 2, kill_at=place, only_worker=True)
            if answer["status"] == -signal.SIGKILL:
                trials.note("the parent's turn")  # the order of operations differs from run to run
            else:
                check_refusal(answer, "a worker process was killed by signal 9", "--workers")
            preparation.check_versions()
            preparation.check_old_files()
            preparation.check_rerun("--workers", 2)
    torture_figures(lane="A", case="SIGKILL of one worker process", trials=trials.count, failures=len(trials.failures))
    assert trials.failures == []
    assert trials.seen.get("the parent's turn", 0) < trials.count, "no worker was killed"
