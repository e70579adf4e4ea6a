"""What a GPU is doing, as its driver tells: power, temperature, and how busy its units are.

In: the GPUs that torch uses in this process. Out: per GPU and sample

    power_watts, temperature_celsius, utilization_percent    wherever the driver answers
    sm_active_percent, tensor_active_percent, dram_active_percent
                            NVML's GPM counters, on Hopper and later: the mean since the sample before

`utilization_percent` is the share of time in which any kernel ran, however small; the GPM figures say how much of the
card it used. What a card doesn't have is left out. Needs nvidia-ml-py; asking the driver takes well under a
millisecond.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["GpuActivity"]


class GpuActivity:
    """Asks NVML about the GPUs with these UUIDs; has nothing to say where there is no NVML or no such GPU."""

    def __init__(self, uuids: Sequence[str], *, nvml: Any = None) -> None:
        self._nvml: Any = nvml
        self._cards: list[_Card] = []
        if not uuids:
            return
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            self._nvml.nvmlInit()
            self._cards = [_Card(self._nvml, uuid) for uuid in uuids]
        except self._nvml.NVMLError:
            self._cards = []

    def samples(self) -> list[dict[str, float]]:
        """The figures of each GPU, in the order of the UUIDs; empty where nothing is known."""
        return [card.sample() for card in self._cards]

    def close(self) -> None:
        """Gives the driver's memory back."""
        for card in self._cards:
            card.close()
        if self._cards:
            self._nvml.nvmlShutdown()
        self._cards = []


class _Card:
    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._counters: list[Any] = []  # two GPM samples, the older first; none where the card has no GPM
        try:
            if nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self._counters = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
                nvml.nvmlGpmSampleGet(self._handle, self._counters[0])
        except nvml.NVMLError:
            self._free_counters()

    def sample(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        questions: dict[str, Callable[[], Any]] = {
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        }
        found = {}
        for name, ask in questions.items():
            try:
                found[name] = float(ask())
            except nvml.NVMLError:
                continue  # this card doesn't tell
        return found | self._active()

    def _active(self) -> dict[str, float]:
        """GPM's means between the last two samples."""
        if not self._counters:
            return {}
        nvml = self._nvml
        metrics = {
            "sm_active_percent": nvml.NVML_GPM_METRIC_SM_UTIL,
            "tensor_active_percent": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "dram_active_percent": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        older, newer = self._counters
        try:
            nvml.nvmlGpmSampleGet(self._handle, newer)
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = len(metrics)
            asked.sample1, asked.sample2 = older, newer
            for place, metric in enumerate(metrics.values()):
                asked.metrics[place].metricId = metric
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError:
            self._free_counters()
            return {}
        self._counters = [newer, older]
        answers = [asked.metrics[place] for place in range(len(metrics))]
        return {
            name: round(float(answer.value), 2)
            for name, answer in zip(metrics, answers, strict=True)
            if answer.nvmlReturn == nvml.NVML_SUCCESS
        }

    def _free_counters(self) -> None:
        counters, self._counters = self._counters, []
        for counter in counters:
            self._nvml.nvmlGpmSampleFree(counter)

    def close(self) -> None:
        self._free_counters()
