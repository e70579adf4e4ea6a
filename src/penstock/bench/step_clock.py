"""The clock of a training loop, ours or a peer's, and what it found.

A loop tells it of every step. The clock starts when the task begins to build, notes the end of the first step, and
times from the end of the last warm-up step to the end of the last one. At those three moments it waits for the device,
unless it is told that the step has ended there, and never in between, so that a loop that lets the device run behind
isn't slowed. Between them NVML's activity counters are read where the card has them.

Tokens are positions computed: rows x row length of every step, the same for all sides.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["StepClock", "device_peak_flops"]


class StepClock:
    """Times the steps of one task."""

    def __init__(self, *, num_steps: int, warm_up_steps: int, tokens_per_step: int) -> None:
        import torch

        self._num_steps = num_steps
        self._warm_up_steps = warm_up_steps
        self._tokens_per_step = tokens_per_step
        self._has_gpu = torch.cuda.is_available()
        self._begin = time.perf_counter()
        self._done = 0
        self._moments: dict[int, float] = {}
        self._activity: list[dict[str, float]] = []
        self._counters: Any = None

    def step_done(self, *, is_finished: bool = False) -> None:
        """A step has been queued; or, with `is_finished`, is done on the device, which may be at work on the next."""
        self._done += 1
        if self._done in (1, self._warm_up_steps, self._num_steps):
            if not is_finished:
                self._wait()
            self._moments[self._done] = time.perf_counter()
        if self._done == self._warm_up_steps:
            self._counters = _activity_counters() if self._has_gpu else None
        elif self._done == self._num_steps and self._counters is not None:
            self._activity = self._counters.samples()
            self._counters.close()

    @property
    def is_steady(self) -> bool:
        """Whether the warm-up is over."""
        return self._done >= self._warm_up_steps

    def _wait(self) -> None:
        if self._has_gpu:
            import torch

            torch.cuda.synchronize()

    @property
    def seconds(self) -> float:
        """Of the steps that count."""
        return self._moments[self._num_steps] - self._moments[self._warm_up_steps]

    def report(self, *, flops_per_token: float | None, **figures: Any) -> dict[str, Any]:
        """What was measured, for the result."""
        import torch

        timed = self._num_steps - self._warm_up_steps
        rate = timed * self._tokens_per_step / self.seconds
        peak = device_peak_flops()
        report = {
            "tokens_per_second": rate,
            "first_step_seconds": self._moments[1] - self._begin,
            "steps_timed": timed,
            "device": torch.cuda.get_device_name() if self._has_gpu else "cpu",
            "flops_per_token": flops_per_token,
            "model_teraflops": None if flops_per_token is None else rate * flops_per_token / 1e12,
            "mfu_percent": None if flops_per_token is None or peak is None else 100 * rate * flops_per_token / peak,
            "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if self._has_gpu else None,
            **figures,
        }
        for name in ("sm_active_percent", "tensor_active_percent", "dram_active_percent", "power_watts"):
            if self._activity and name in self._activity[0]:
                report[name] = self._activity[0][name]
        return report


def _activity_counters() -> Any:
    """NVML's counters, from now on."""
    import torch

    from penstock.train.gpu_activity import GpuActivity

    return GpuActivity([str(torch.cuda.get_device_properties(0).uuid)])


def device_peak_flops() -> float | None:
    """The GPU's dense bf16 peak; None without a GPU, or where it isn't known."""
    from penstock.hardware import probe

    gpus = probe().gpus
    return gpus[0].peak_bf16_flops if gpus else None
