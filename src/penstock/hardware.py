"""What this machine is: the cores and memory this process may use, its GPUs and what those can do at best.

In: the kernel's and the driver's answers (`probe`), or the name of a machine that isn't here (`profile`), so that rules
which choose settings by hardware can be tested on any machine. Out: a `Hardware` record, JSON-able for run records.
Cores and memory are those *available*: a container limited to 2 of 64 cores has 2. GPUs are asked of NVML through the
package nvidia-ml-py; without it, or without a driver, there are none and `gpu_note` says why. Costs a few milliseconds
without a GPU and some tens with one; imports neither torch nor jax.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError, nearest_first

__all__ = [
    "PROFILE_NAMES",
    "Gpu",
    "Hardware",
    "available_cores",
    "default_workers",
    "gpu_named",
    "peak_memory_bytes",
    "probe",
    "profile",
]

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card. A peak of None means unknown or, below compute capability 8.0, that the card has no bf16 units."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    peak_bf16_flops: float | None
    memory_bandwidth_bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine as this process may use it. `profile` is None for the real one."""

    cpu_name: str
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_note: str
    platform: str
    python: str
    profile: str | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values: what `json.loads` gives back equals what this returned."""
        gpus = [asdict(gpu) | {"compute_capability": list(gpu.compute_capability)} for gpu in self.gpus]
        return asdict(self) | {"gpus": gpus}


class _Peak(NamedTuple):
    """Dense bf16 tensor TFLOP/s with fp32 accumulation (None: no bf16 units), and memory bandwidth in GB/s."""

    bf16_teraflops: float | None
    gigabytes_per_second: float


# Keyed by the whole name that NVML gives, without the leading "NVIDIA ": a part of it would also match laptop, Ti, D
# and Super cards, which are other cards. Datasheets often print tensor figures with 2:4 sparsity; these are dense.
_PEAKS = {
    # NVIDIA HGX B200, DGX B200 and GB200 NVL72 datasheets: 36 PFLOP/s sparse for 8, 360 for 72; 8 TB/s each.
    "B200": _Peak(2250, 8000),
    "GB200": _Peak(2500, 8000),
    # NVIDIA H200 datasheet: 1,979 TFLOP/s sparse (SXM), 1,671 (NVL); 4.8 TB/s.
    "H200": _Peak(989, 4800),
    "H200 NVL": _Peak(835.5, 4800),
    # 989 and 756 are the dense figures of the H100 architecture whitepaper, which everyone's MFU is quoted with.
    # NVIDIA H100 datasheet: 1,979 TFLOP/s sparse and 3.35 TB/s (SXM); 1,671 and 3.9 (NVL); 1,513 and 2.0 (PCIe).
    "H100 80GB HBM3": _Peak(989, 3350),
    "H100 NVL": _Peak(835.5, 3900),
    "H100 PCIe": _Peak(756, 2000),
    # NVIDIA GH200 datasheet: 990 TFLOP/s dense; 4 TB/s with 96 GB HBM3 (the 480 GB are the CPU's).
    "GH200 480GB": _Peak(990, 4000),
    # NVIDIA A100 datasheet (2021): 312 TFLOP/s dense; 1,555 GB/s with 40 GB, 80 GB: 1,935 (PCIe) and 2,039 (SXM).
    "A100-SXM4-40GB": _Peak(312, 1555),
    "A100-PCIE-40GB": _Peak(312, 1555),
    "A100-SXM4-80GB": _Peak(312, 2039),
    "A100 80GB PCIe": _Peak(312, 1935),
    # NVIDIA A30, A40, A10 datasheets (dense figures printed), and the A10G datasheet by AWS.
    "A30": _Peak(165, 933),
    "A40": _Peak(149.7, 696),
    "A10": _Peak(125, 600),
    "A10G": _Peak(70, 600),
    # NVIDIA L4 datasheet (242 sparse), L40 (181.05 dense), L40S (362.05 dense).
    "L4": _Peak(121, 300),
    "L40": _Peak(181.05, 864),
    "L40S": _Peak(362.05, 864),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendices; bf16 with fp32 accumulation, dense.
    "GeForce RTX 5090": _Peak(209.5, 1792),
    "GeForce RTX 5080": _Peak(112.6, 960),
    "GeForce RTX 5070 Ti": _Peak(87.9, 896),
    "GeForce RTX 5070": _Peak(61.7, 672),
    # NVIDIA Ada GPU architecture whitepaper, appendices (which also list the 3090 Ti).
    "GeForce RTX 4090": _Peak(165.2, 1008),
    "GeForce RTX 4080": _Peak(97.5, 716.8),
    "GeForce RTX 3090 Ti": _Peak(80, 1008),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, tables of the 3090 and 3070.
    "GeForce RTX 3090": _Peak(71, 936),
    "GeForce RTX 3070": _Peak(40.6, 448),
    # No bf16 tensor units before Ampere. NVIDIA V100 datasheet, T4 product brief, GeForce product pages.
    "Tesla V100-SXM2-16GB": _Peak(None, 900),
    "Tesla V100-SXM2-32GB": _Peak(None, 900),
    "Tesla V100-PCIE-16GB": _Peak(None, 900),
    "Tesla V100-PCIE-32GB": _Peak(None, 900),
    "Tesla T4": _Peak(None, 320),
    "GeForce RTX 2060": _Peak(None, 336),
    "GeForce GTX 1050": _Peak(None, 112),
}


def gpu_named(name: str, *, memory_bytes: int, compute_capability: tuple[int, int]) -> Gpu:
    """A card as drivers report it, with the peaks that its data sheet gives, if it is known by that name."""
    peak = _PEAKS.get(name.removeprefix("NVIDIA "))
    bf16_teraflops = peak.bf16_teraflops if peak else None
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        compute_capability=compute_capability,
        peak_bf16_flops=None if bf16_teraflops is None else bf16_teraflops * 1e12,
        memory_bandwidth_bytes_per_second=peak.gigabytes_per_second * 1e9 if peak else None,
    )


class _Profile(NamedTuple):
    cpu_cores: int
    memory_gib: int
    gpu_name: str = ""
    gpu_memory_mib: int = 0
    compute_capability: tuple[int, int] = (0, 0)


# Each tier is a card one can buy. Memory is what the driver reports, which on many cards is less than the name says:
# rules have to cope with that. Those of 4 and 12 GB stand for the many cards whose peaks aren't in the table.
_PROFILES = {
    "cpu-2": _Profile(2, 8),
    "cpu-8": _Profile(8, 32),
    "gpu-2gb": _Profile(4, 8, "NVIDIA GeForce GTX 1050", 2048, (6, 1)),
    "gpu-4gb": _Profile(4, 8, "NVIDIA GeForce GTX 1650", 4096, (7, 5)),
    "gpu-6gb": _Profile(8, 16, "NVIDIA GeForce RTX 2060", 6144, (7, 5)),
    "gpu-8gb": _Profile(8, 16, "NVIDIA GeForce RTX 3070", 8192, (8, 6)),
    "gpu-12gb": _Profile(8, 32, "NVIDIA GeForce RTX 3060", 12288, (8, 6)),
    "gpu-16gb": _Profile(4, 16, "Tesla T4", 15360, (7, 5)),
    "gpu-24gb": _Profile(16, 64, "NVIDIA GeForce RTX 4090", 24564, (8, 9)),
    "gpu-48gb": _Profile(16, 128, "NVIDIA L40S", 46068, (8, 9)),
    "gpu-80gb": _Profile(26, 200, "NVIDIA H100 80GB HBM3", 81559, (9, 0)),
    "gpu-141gb": _Profile(16, 128, "NVIDIA H200", 143771, (9, 0)),
}
PROFILE_NAMES = tuple(_PROFILES)


def profile(name: str) -> Hardware:
    """A named machine that need not be here; an unknown name is a `ConfigError` listing the known ones."""
    spec = _PROFILES.get(name)
    if spec is None:
        raise ConfigError(
            f"unknown hardware profile {name!r}, expected one of {nearest_first(name, _PROFILES)}",
            hint="choose one of those, or leave the profile out to use this machine as it is",
        )
    gpus: tuple[Gpu, ...] = ()
    if spec.gpu_name:
        memory_bytes = spec.gpu_memory_mib * _MIB
        gpus = (gpu_named(spec.gpu_name, memory_bytes=memory_bytes, compute_capability=spec.compute_capability),)
    return Hardware(
        cpu_name="profile",
        cpu_cores=spec.cpu_cores,
        memory_bytes=spec.memory_gib * _GIB,
        gpus=gpus,
        gpu_note="" if gpus else "the profile has none",
        platform="profile",
        python=platform.python_version(),
        profile=name,
    )


def probe() -> Hardware:
    """This machine, as far as this process may use it."""
    gpus, gpu_note = _probe_gpus()
    return Hardware(
        cpu_name=_cpu_name(),
        cpu_cores=_available_cores(Path("/")),
        memory_bytes=_available_memory_bytes(Path("/")),
        gpus=gpus,
        gpu_note=gpu_note,
        platform=platform.platform(),
        python=platform.python_version(),
        profile=None,
    )


def default_workers(hardware: Hardware) -> int:
    """Worker count of `prepare`: every core the process may use, since encoding is bound by the CPU."""
    return max(1, hardware.cpu_cores)


def available_cores() -> int:
    """Cores that this process may use."""
    return _available_cores(Path("/"))


def peak_memory_bytes(*, children: int = 0) -> int:
    """The most memory this process has held so far (resident).

    With `children`, so many times the most that any child which has ended held is added: more than the truth, since
    pages that a fork shares are counted each time.
    """
    if children:
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return peak_memory_bytes() + children * (largest if sys.platform == "darwin" else largest * 1024)
    # getrusage on Linux also counts the process that started this one, up to its exec: a small worker of a 10 GB parent
    # would report 10 GB. The kernel's high-water mark of this program's own memory does not.
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def _available_cores(root: Path) -> int:
    """Cores by affinity mask and by cgroup quota; of a quota of 1.5 cores two workers make use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([allowed, *map(math.ceil, quotas)]))


def _available_memory_bytes(root: Path) -> int:
    limits = [limit for folder in _cgroup_folders(root, "memory") if (limit := _memory_limit(folder)) is not None]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The cgroup of this process for a controller and all its parents: each may set a limit, the smallest holds.

    Inside a container the path may be the host's and not exist here; the walk up then ends at the container's own root.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree for all controllers; beside version 1 it hangs at "unified"
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount)))


def _cpu_quota(folder: Path) -> float | None:
    """Cores a cgroup may use at a time: cpu.max in version 2, cfs_quota_us and cfs_period_us in version 1."""
    both = _first_line(folder / "cpu.max").split()
    if not both:
        both = [_first_line(folder / f"cpu.cfs_{part}_us") for part in ("quota", "period")]
    numbers = [int(text) for text in both if text.lstrip("-").isdigit()]
    return numbers[0] / numbers[1] if len(numbers) == 2 and numbers[0] > 0 and numbers[1] > 0 else None


def _memory_limit(folder: Path) -> int | None:
    """Bytes a cgroup may hold; "max", or in version 1 a number beyond any machine, is no limit."""
    text = _first_line(folder / "memory.max") or _first_line(folder / "memory.limit_in_bytes")
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """The lines of a kernel file; none where it doesn't exist or isn't ours to read."""
    try:
        return path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _first_line(path: Path) -> str:
    return next(iter(_lines(path)), "")


def _cpu_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _probe_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs this process may use, and why there are none or fewer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return (), "pynvml not installed: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"no NVIDIA driver ({error})"
    try:
        return _nvml_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver answered with an error ({error})"
    finally:
        nvml.nvmlShutdown()


def _nvml_gpus(nvml: Any, visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return (), "the NVIDIA driver lists no GPU"
    notes = []
    if visible is not None:
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = _visible_indices(visible, uuids)
        if len(chosen) < len(handles):
            notes.append(f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(chosen)} of {len(handles)} GPUs")
        handles = [handles[index] for index in chosen]
    gpus = []
    for handle in handles:
        name = _text(nvml.nvmlDeviceGetName(handle))
        try:
            memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except nvml.NVMLError as error:  # chips that share the CPU's memory have no answer
            notes.append(f"{name} left out: its memory is unknown ({error})")
            continue
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpus.append(gpu_named(name, memory_bytes=memory_bytes, compute_capability=(int(major), int(minor))))
    return tuple(gpus), "; ".join(notes)


def _visible_indices(visible: str, uuids: list[str]) -> list[int]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: numbers or beginnings of UUIDs, up to the first that names no card."""
    indices: list[int] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdigit():
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(matches) != 1 or matches[0] in indices:
            break
        indices.append(matches[0])
    return indices


def _text(value: str | bytes) -> str:
    """NVML's strings: bytes before nvidia-ml-py 11.515."""
    return value.decode() if isinstance(value, bytes) else value
