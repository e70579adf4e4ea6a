from __future__ import annotations

import pytest

from penstock.train import load_config
from penstock.train.tuning import PROFILES, batch_rows_for_memory, workers_for_cores


@pytest.mark.parametrize(
    ("gigabytes", "rows"), [(24, 8), (7.0, 8), (6.9, 4), (6.0, 4), (4.0, 4), (3.9, 2), (2.0, 2), (1.9, 1), (None, 2)]
)
def test_rows_by_memory(gigabytes: float | None, rows: int) -> None:
    assert batch_rows_for_memory(gigabytes) == rows


def test_the_reference_config_on_the_reference_cards() -> None:
    rows = {name: batch_rows_for_memory(profile.gigabytes) for name, profile in PROFILES.items()}
    assert rows["gpu-2gb"] == 2
    assert rows["gpu-4gb"] == 4
    assert rows["gpu-6gb"] == 4
    assert all(rows[name] == 8 for name in ("gpu-8gb", "gpu-12gb", "gpu-16gb", "gpu-24gb", "gpu-141gb"))


def test_the_tiers_follow_their_settings() -> None:
    assert batch_rows_for_memory(6.0, medium=3) == 3
    assert batch_rows_for_memory(6.0, large_gigabytes=6.0) == 8
    assert batch_rows_for_memory(1.0, small_gigabytes=0.5, small=7) == 7


@pytest.mark.parametrize(("cores", "workers"), [(8, 4), (2, 1), (1, 1), (64, 8), (5, 2)])
def test_workers_are_half_of_the_cores(cores: int, workers: int) -> None:
    assert workers_for_cores(cores) == workers


def test_workers_keep_to_their_limits() -> None:
    assert workers_for_cores(8, lowest=6) == 6
    assert workers_for_cores(8, highest=3) == 3
    assert workers_for_cores(PROFILES["gpu-6gb"].cores) == 4


def test_warm_up_of_the_reference_run() -> None:
    assert load_config(None, ["steps=66", "warmup_ratio=0.1"]).num_warmup_steps == 7
