"""The hardware as the rules see it: one device, its memory, its speed.

In: a `Hardware` record, of this machine or of a named one that isn't here. Out: `HardwareProfile`. Needs no torch, so
that `penstock doctor --profile gpu-6gb` answers anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError, nearest_first
from penstock.hardware import PROFILE_NAMES, Gpu, Hardware, probe
from penstock.hardware import profile as named_hardware

__all__ = ["PROFILES", "HardwareProfile", "profile_named", "profile_of", "this_machine"]

# bf16 units came with Ampere; Triton, which compiles for GPUs, needs Volta.
BF16_CAPABILITY = (8, 0)
COMPILER_CAPABILITY = (7, 0)
# What is assumed of a card whose peak isn't known: an entry card of 2018. It only weighs how long a run may take.
ASSUMED_GPU_FLOPS = 10e12


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """What a run would compute on. Without a GPU, memory is the machine's."""

    name: str
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    cores: int
    peak_flops: float | None
    has_bf16: bool
    can_compile: bool

    @property
    def gigabytes(self) -> float | None:
        """GPU memory in GiB; None without a GPU."""
        return self.memory_bytes / 2**30 if self.device == "cuda" else None


def profile_of(hardware: Hardware, *, device: str = "auto") -> HardwareProfile:
    """The first GPU of a machine, or its CPU where it has none or `device` says so."""
    if hardware.gpus and device != "cpu":
        return _of_gpu(hardware.gpus[0], cores=hardware.cpu_cores)
    return HardwareProfile(
        name=hardware.profile or hardware.cpu_name,
        device="cpu",
        memory_bytes=hardware.memory_bytes,
        cores=hardware.cpu_cores,
        peak_flops=None,
        has_bf16=False,
        can_compile=False,  # by rule: it pays back on no CPU that we measured
    )


def _of_gpu(gpu: Gpu, *, cores: int) -> HardwareProfile:
    return HardwareProfile(
        name=gpu.name,
        device="cuda",
        memory_bytes=gpu.memory_bytes,
        cores=cores,
        peak_flops=gpu.peak_bf16_flops,
        has_bf16=gpu.compute_capability >= BF16_CAPABILITY,
        can_compile=gpu.compute_capability >= COMPILER_CAPABILITY,
    )


def this_machine(device: str) -> HardwareProfile:
    """This machine as torch will use it; GPUs are asked of torch, since NVML may be missing or count otherwise."""
    hardware = probe()
    if device != "cuda":
        return profile_of(hardware, device="cpu")
    import torch

    from penstock.hardware import gpu_named

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (found.major, found.minor)
    gpu = gpu_named(found.name, memory_bytes=found.total_memory, compute_capability=capability)
    return _of_gpu(gpu, cores=hardware.cpu_cores)


def profile_named(name: str) -> HardwareProfile:
    """A built-in profile; an unknown name is a `ConfigError` listing the known ones."""
    if name not in PROFILES:
        raise ConfigError(
            f"unknown hardware profile {name!r}, expected one of {nearest_first(name, PROFILES)}",
            hint="choose one of those",
        )
    return PROFILES[name]


PROFILES = {name: profile_of(named_hardware(name)) for name in PROFILE_NAMES}
