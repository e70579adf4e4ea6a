"""What the machine is doing while a run is under way: a `hardware` record every few seconds.

In: a run's log. Out: records of processor load (percent of all cores), this process's memory, and for each GPU its
memory, power and activity (gpu_activity.py). One daemon thread that sleeps nearly always; it takes a last sample when
it is told to stop, so that the shortest run has one. If the log can't be written the thread ends, and an event says so
when the block does.
"""

from __future__ import annotations

import threading
from typing import Any

import psutil
import torch

from penstock.runlog import RunLog
from penstock.train.gpu_activity import GpuActivity

__all__ = ["HardwareMonitor"]

SECONDS_BETWEEN_SAMPLES = 5.0


class HardwareMonitor:
    """Samples the machine inside a `with` block."""

    def __init__(self, log: RunLog, *, seconds_between_samples: float = SECONDS_BETWEEN_SAMPLES) -> None:
        self._log = log
        self._seconds_between_samples = seconds_between_samples
        self._stop = threading.Event()
        self._process = psutil.Process()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="penstock-hardware", daemon=True)
        self._failure: OSError | None = None
        self._activity: GpuActivity | None = None

    def _sample_until_stopped(self) -> None:
        psutil.cpu_percent(interval=None)  # the first answer is meaningless; later ones cover the time between calls
        try:
            while not self._stop.wait(self._seconds_between_samples):
                self._log.append("hardware", **self._sample())
            self._log.append("hardware", **self._sample())
        except OSError as error:
            self._failure = error
        finally:
            if self._activity is not None:
                self._activity.close()

    def _sample(self) -> dict[str, Any]:
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)  # type: ignore[no-untyped-call]
        if self._activity is None and gpus:
            self._activity = GpuActivity([str(torch.cuda.get_device_properties(index).uuid) for index in gpus])
        figures_of_gpus = (self._activity.samples() if self._activity else []) or [{} for _ in gpus]
        return {
            "cpu_percent": psutil.cpu_percent(interval=None),
            "memory_bytes": self._process.memory_info().rss,
            "gpu": [
                {
                    "index": index,
                    "memory_bytes": torch.cuda.memory_allocated(index),
                    "peak_memory_bytes": torch.cuda.max_memory_allocated(index),
                    **figures,
                }
                for index, figures in zip(gpus, figures_of_gpus, strict=True)
            ],
        }

    def __enter__(self) -> HardwareMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            self._log.append("event", message=f"hardware samples ended early: {self._failure}")
