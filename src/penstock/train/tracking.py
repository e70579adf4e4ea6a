"""A run's figures where people follow them: TensorBoard, Weights & Biases, MLflow, Trackio.

In: the records of a run, as they are written. Out: TensorBoard event files under RUN/tensorboard wherever tensorboard
is installed, and what the trackers named in `trackers` make of the same figures. A tracker that fails is recorded once
and left alone from then on: watching never ends a run. None of them reaches for the network unless `network` is set:
wandb works offline (RUN/wandb; `wandb sync` sends it later), mlflow into RUN/mlflow.db, trackio on this machine.

Event files are written with tensorboard's own record writer and messages, without its file layer: where tensorflow is
installed too, that layer would load it, which takes seconds and half a gigabyte.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from penstock import fs
from penstock.errors import ConfigError, PenstockError
from penstock.runlog import Record
from penstock.train.config import TrainConfig

__all__ = ["TENSORBOARD_FOLDER", "Tracker", "Trackers", "open_trackers", "scalars_of"]

TENSORBOARD_FOLDER = "tensorboard"
PROJECT = "penstock"


class Tracker(Protocol):
    """Somewhere that figures by step go to."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Takes the figures of a step."""

    def close(self, *, is_completed: bool) -> None:
        """The run is over."""


class Trackers:
    """Hands each record's figures to every tracker; drops one that fails."""

    def __init__(self, trackers: Mapping[str, Tracker], tell_event: Callable[[str], object]) -> None:
        self._trackers = dict(trackers)
        self._tell_event = tell_event
        self.is_completed = False

    def tell(self, record: Record) -> None:
        """Logs the record's figures, if it has any."""
        scalars = scalars_of(record)
        if scalars:
            self._each(lambda tracker: tracker.log(scalars, record["step"]))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001  whatever a tracker raises, the run goes on; it is recorded
                del self._trackers[name]
                self._tell_event(f"the tracker {name} failed and isn't used any more: {error!r}")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self._each(lambda tracker: tracker.close(is_completed=self.is_completed))


def scalars_of(record: Record) -> dict[str, float]:
    """The figures of a step, an evaluation or a pass, by the names they have in a tracker."""
    kind = record["kind"]
    if kind == "step":
        names = ("loss", "learning_rate", "grad_norm", "mfu_percent")
        found = {f"train/{name}": record.get(name) for name in names}
        if record["seconds"] > 0:
            found["train/tokens_per_second"] = record["tokens"] / record["seconds"]
            found["train/data_stall_percent"] = 100 * record["data_seconds"] / record["seconds"]
    elif kind == "evaluation":
        place = f"{record['split']}/{record['store']}" if "store" in record else record["split"]
        found = {f"{place}/{name}": record.get(name) for name in ("loss", "bits_per_byte")}
    elif kind == "epoch":
        found = {f"epoch/{name}": record.get(name) for name in ("mean_train_loss", "val_loss", "tokens_per_second")}
    else:
        return {}
    return {name: float(value) for name, value in found.items() if value is not None}


def open_trackers(
    config: TrainConfig,
    run_folder: Path,
    *,
    first_step: int,
    tell_event: Callable[[str], object],
    is_main: bool = True,
) -> Trackers:
    """TensorBoard where it is installed, and the trackers asked for; of several processes the main one has them.

    Raises:
        ConfigError: a tracker was asked for that isn't installed.
    """
    if not is_main:
        return Trackers({}, tell_event=tell_event)
    for asked in config.trackers:
        if not _is_installed(asked):
            raise ConfigError(f"trackers names {asked}, which isn't installed", hint=f"pip install {asked}")
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(run_folder, first_step=first_step),
        **{name: partial(_MAKERS[name], config, run_folder) for name in config.trackers},
    }
    if not _is_installed("tensorboard"):
        del makers["tensorboard"]
        tell_event("no TensorBoard files: tensorboard isn't installed (pip install tensorboard)")
    trackers: dict[str, Tracker] = {}
    for name, make in makers.items():
        try:
            trackers[name] = make()
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001  as above: recorded, and the run goes on without it
            tell_event(f"the tracker {name} couldn't be started and isn't used: {error!r}")
    return Trackers(trackers, tell_event)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class _TensorBoard:
    """One event file for each start of the run; of steps done again after a resume, TensorBoard shows the later."""

    def __init__(self, run_folder: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        folder = run_folder / TENSORBOARD_FOLDER
        fs.make_folder(folder)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._file = fs.AppendOnlyFile(folder / f"events.out.tfevents.{time.time_ns()}.{PROJECT}.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if first_step:
            status = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=first_step + 1, session_log=status)

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self, *, is_completed: bool) -> None:
        self._file.close()


class _Wandb:
    def __init__(self, config: TrainConfig, run_folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        # Offline unless the network was asked for; `WANDB_MODE=disabled` of the user's own stays what it is.
        mode = None if config.network or os.environ.get("WANDB_MODE") == "disabled" else "offline"
        self._run = wandb.init(
            project=PROJECT,
            name=run_folder.name,
            dir=str(run_folder),
            config=config.model_dump(mode="json"),
            mode=mode,
        )

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, *, is_completed: bool) -> None:
        self._run.finish(exit_code=0 if is_completed else 1)


class _Mlflow:
    def __init__(self, config: TrainConfig, run_folder: Path) -> None:
        if not config.network:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        self._mlflow: Any = importlib.import_module("mlflow")
        if not (config.network and os.environ.get("MLFLOW_TRACKING_URI")):
            self._mlflow.set_tracking_uri(f"sqlite:///{(run_folder / 'mlflow.db').resolve()}")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=run_folder.name)
        settings = config.model_dump(mode="json")
        model = settings.pop("model")
        self._mlflow.log_params({**settings, **{f"model.{key}": value for key, value in model.items()}})

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self, *, is_completed: bool) -> None:
        self._mlflow.end_run(status="FINISHED" if is_completed else "KILLED")


class _Trackio:
    def __init__(self, config: TrainConfig, run_folder: Path) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=run_folder.name, config=config.model_dump(mode="json"))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self, *, is_completed: bool) -> None:
        self._trackio.finish()


_MAKERS: dict[str, Callable[[TrainConfig, Path], Tracker]] = {
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
