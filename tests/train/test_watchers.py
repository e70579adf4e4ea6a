"""Callbacks, trackers and hardware samples: what watches a run, and what it may do to it."""

# ruff: noqa: N802  the fake driver has the names of the real one

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, TrainingError
from penstock.runlog import Record, read_records
from penstock.train import TrainResult, find_latest
from penstock.train.callbacks import Callback
from penstock.train.gpu_activity import GpuActivity
from penstock.train.tracking import TENSORBOARD_FOLDER, scalars_of

from .conftest import Train, events, losses


class Notes(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []
        self.saves: list[str] = []
        self.result: TrainResult | None = None

    def on_step(self, step: Record) -> None:
        self.steps.append(step["step"])

    def on_evaluation(self, evaluation: Record) -> None:
        self.evaluations.append(evaluation["step"])

    def on_save(self, checkpoint: Record) -> None:
        self.saves.append(checkpoint["path"])

    def on_end(self, result: TrainResult) -> None:
        self.result = result


class Stop(Callback):
    def on_step(self, step: Record) -> bool:
        return bool(step["step"] == 3)


class Broken(Callback):
    def __init__(self, method: str) -> None:
        self._method = method

    def __getattribute__(self, name: str) -> Any:
        if name == "_method" or name.startswith("__") or name != self._method:
            return super().__getattribute__(name)
        raise ZeroDivisionError(name)


def test_callbacks_see_every_step_evaluation_and_save(tmp_path: Path, run_training: Train) -> None:
    notes = Notes()
    result = run_training(tmp_path, "log_every_steps=5", callbacks=[notes, Callback()])
    assert notes.steps == list(range(1, 9))
    assert notes.evaluations == [4, 8]
    assert notes.saves == ["checkpoints/step-00000004", "checkpoints/step-00000008"]
    assert notes.result == result


def test_a_callback_may_end_the_run_which_can_be_resumed(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path / "whole")
    notes = Notes()
    result = run_training(tmp_path / "cut", callbacks=[Stop(), notes])
    assert (result.status, result.steps, notes.steps) == ("interrupted", 3, [1, 2, 3])
    assert any("Stop.on_step asked for it" in message for message in events(tmp_path / "cut"))
    assert run_training(tmp_path / "cut", resume=True).status == "completed"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize(("method", "step"), [("on_step", 1), ("on_evaluation", 4), ("on_end", 8)])
def test_a_callback_that_fails_is_named_after_a_save(
    tmp_path: Path, run_training: Train, method: str, step: int
) -> None:
    with pytest.raises(TrainingError, match=rf"Broken\.{method} failed.*ZeroDivisionError") as caught:
        run_training(tmp_path, callbacks=[Broken(method)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    saved = find_latest(tmp_path)
    assert saved is not None
    assert saved.step == step
    assert run_training(tmp_path, resume=True).status == "completed"


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Read back by tensorboard itself; the module named here tells it to do without tensorflow, which takes 10 s."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / TENSORBOARD_FOLDER))
    read.Reload()
    return {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_tensorboard_reads_what_was_recorded_also_after_a_resume(tmp_path: Path, run_training: Train) -> None:
    pytest.importorskip("tensorboard")
    run_training(tmp_path, "stop_after_steps=6")
    run_training(tmp_path, resume=True)
    assert len(list((tmp_path / TENSORBOARD_FOLDER).iterdir())) == 2
    found = tensorboard_scalars(tmp_path)
    assert found["train/loss"] == {step: as_float32(loss) for step, loss in losses(tmp_path)}
    evaluations = [record for record in read_records(tmp_path) if record["kind"] == "evaluation"]
    assert found["val/bits_per_byte"] == {one["step"]: as_float32(one["bits_per_byte"]) for one in evaluations}
    assert {"train/learning_rate", "train/grad_norm", "train/tokens_per_second"} <= found.keys()


def test_importing_penstock_needs_no_tracker() -> None:
    code = "import sys, penstock, penstock.train; print([m for m in ('tensorboard', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class FakeWandb(types.ModuleType):
    """What wandb offers, as far as a run uses it."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__("wandb")
        self.__spec__ = sys.__spec__  # found by importlib
        self.given: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int]] = []
        self.exit_code: int | None = None
        self.fails_at = fails_at

    def init(self, **given: Any) -> FakeWandb:
        self.given = given
        return self

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("gone")
        self.logged.append((scalars, step))

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_stays_offline_unless_the_network_is_asked_for(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for network, mode in (("false", "offline"), ("true", None)):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        run_training(tmp_path / network, "trackers=[wandb]", f"network={network}", "steps=2")
        assert (fake.given["mode"], fake.given["dir"]) == (mode, str(tmp_path / network))
        assert [step for scalars, step in fake.logged if "train/loss" in scalars] == [1, 2]
        assert fake.exit_code == 0


def test_a_tracker_that_fails_is_recorded_once_and_the_run_goes_on(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails_at=2))
    assert run_training(tmp_path, "trackers=[wandb]").status == "completed"
    (message,) = [message for message in events(tmp_path) if "wandb" in message]
    assert "gone" in message


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.tracking._is_installed", lambda name: name == "tensorboard")
    with pytest.raises(ConfigError) as caught:
        run_training(tmp_path, "trackers=[mlflow]")
    assert caught.value.hint == "pip install mlflow"


def test_without_tensorboard_one_event_says_so(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.tracking._is_installed", lambda _name: False)
    assert run_training(tmp_path, "steps=2").status == "completed"
    assert sum("tensorboard" in message for message in events(tmp_path)) == 1
    assert not (tmp_path / TENSORBOARD_FOLDER).exists()


def test_figures_of_records() -> None:
    step = {"kind": "step", "loss": 2.0, "tokens": 100, "seconds": 0.5, "data_seconds": 0.05, "mfu_percent": 40.0}
    assert scalars_of(step) == {
        "train/loss": 2.0,
        "train/mfu_percent": 40.0,
        "train/tokens_per_second": 200.0,
        "train/data_stall_percent": 10.0,
    }
    evaluation = {"kind": "evaluation", "split": "val", "store": "books", "loss": 3.0, "bits_per_byte": 1.5}
    assert scalars_of(evaluation) == {"val/books/loss": 3.0, "val/books/bits_per_byte": 1.5}
    assert scalars_of({"kind": "choice"}) == {}


class FakeMetric(ctypes.Structure):
    _fields_ = (("metricId", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint), ("value", ctypes.c_double))


class FakeNvml:
    """A driver with one card, in the calls that GpuActivity makes; GPM samples are lists with the time in them."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_SUCCESS, NVML_TEMPERATURE_GPU, NVML_GPM_METRICS_GET_VERSION = 0, 0, 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 5, 10

    def __init__(self, *, has_gpm: bool) -> None:
        self.has_gpm = has_gpm
        self.time = 0
        self.freed = 0
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError(uuid)
        return uuid

    def nvmlGpmQueryDeviceSupport(self, _handle: str) -> Any:
        return types.SimpleNamespace(isSupportedDevice=self.has_gpm)

    def nvmlGpmSampleAlloc(self) -> list[int]:
        return []

    def nvmlGpmSampleGet(self, _handle: str, sample: list[int]) -> None:
        self.time += 1
        sample[:] = [self.time]

    def nvmlGpmSampleFree(self, _sample: list[int]) -> None:
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return types.SimpleNamespace(metrics=[FakeMetric() for _ in range(8)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        (older,), (newer,) = asked.sample1, asked.sample2
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = metric.metricId + (newer - older) / 10
            metric.nvmlReturn = 3 if metric.metricId == self.NVML_GPM_METRIC_DRAM_BW_UTIL else 0

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        return 350_000

    def nvmlDeviceGetTemperature(self, _handle: str, _sensor: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetUtilizationRates(self, _handle: str) -> Any:
        return types.SimpleNamespace(gpu=97)


def test_what_the_driver_tells_and_what_it_does_not() -> None:
    nvml = FakeNvml(has_gpm=True)
    activity = GpuActivity(["1"], nvml=nvml)
    told = {"power_watts": 350.0, "utilization_percent": 97.0, "sm_active_percent": 2.1, "tensor_active_percent": 5.1}
    # Each sample is over the time since the one before, never since the start.
    assert [activity.samples() for _ in range(3)] == [[told]] * 3
    activity.close()
    assert (nvml.freed, nvml.is_open) == (2, False)

    without = GpuActivity(["GPU-1"], nvml=FakeNvml(has_gpm=False))
    assert without.samples() == [{"power_watts": 350.0, "utilization_percent": 97.0}]
    assert GpuActivity(["2"], nvml=FakeNvml(has_gpm=True)).samples() == []
    assert GpuActivity([]).samples() == []
