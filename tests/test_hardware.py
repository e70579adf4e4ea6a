"""What a process may use: affinity, cgroup limits (read from trees of kernel files made here), GPUs and their peaks.

The driver is NVIDIA's, not ours: a small `pynvml` on the path of a child process answers in its place, as one machine
or another would. Where there is a real one, `test_the_real_driver_is_asked_where_there_is_one` asks it.
"""

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from penstock import hardware
from penstock.errors import ConfigError
from penstock.hardware import PROFILE_NAMES, Gpu, Hardware, default_workers, peak_memory_bytes, probe, profile

GIB = 1 << 30
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
ALL_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

PYNVML = """
import json, os
class NVMLError(Exception): pass
class Memory:
    def __init__(self, total): self.total = total
cards = json.loads(os.environ["CARDS"])
def nvmlInit():
    if not cards: raise NVMLError("Driver Not Loaded")
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(cards)
def nvmlDeviceGetHandleByIndex(index): return cards[index]
def nvmlDeviceGetName(card): return card["name"]
def nvmlDeviceGetUUID(card): return card["uuid"].encode()
def nvmlDeviceGetCudaComputeCapability(card): return card["capability"]
def nvmlDeviceGetMemoryInfo(card):
    if card["memory"] is None: raise NVMLError("Not Supported")
    return Memory(card["memory"])
"""
PRINT_PROBE = "import json; from penstock import hardware; print(json.dumps(hardware.probe().as_dict()))"


def card(name: str, *, uuid: str = "GPU-0", memory: int | None = 8 * GIB, capability: tuple[int, int] = (8, 0)) -> dict:
    return {"name": name, "uuid": uuid, "memory": memory, "capability": capability}


def printed_by(code: str, *folders: Path, **environment: str) -> bytes:
    """What a fresh Python prints that looks for modules in `folders` first."""
    path = [*folders, Path(hardware.__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    inherited = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    everything = inherited | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment
    done = subprocess.run([sys.executable, "-c", code], env=everything, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def probe_with_cards(folder: Path, cards: list[dict], **environment: str) -> dict:
    """The record of a fresh process whose driver lists `cards`; none means that there is no driver."""
    (folder / "pynvml.py").write_text(PYNVML)
    return json.loads(printed_by(PRINT_PROBE, folder, CARDS=json.dumps(cards), **environment))


def root_with(folder: Path, files: dict[str, str]) -> Path:
    """A folder that looks like `/` to the functions that read kernel files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


# The machine


def test_probe_describes_this_machine():
    met = probe()
    assert 1 <= met.cpu_cores <= (os.cpu_count() or 1)
    assert 0 < met.memory_bytes <= MACHINE_BYTES
    assert met.cpu_name
    assert met.platform
    assert met.python == ".".join(map(str, sys.version_info[:3]))
    assert met.profile is None
    assert bool(met.gpus) or met.gpu_note, "no GPU needs a reason"
    assert json.loads(json.dumps(met.as_dict())) == met.as_dict()


def test_probe_needs_neither_torch_nor_jax():
    code = f"import sys; {PRINT_PROBE}; print(sorted({{'torch', 'jax'}} & set(sys.modules)))"
    assert printed_by(code).splitlines()[-1] == b"[]"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity mask")
def test_cores_follow_the_affinity_mask():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + PRINT_PROBE
    assert json.loads(printed_by(code))["cpu_cores"] == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, ALL_CORES),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "99900000 100000\n"}, ALL_CORES),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "100000 100000\n",  # a parent's limit holds for its children
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/01\n0::/\n",  # version 1, seen from inside the container
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            ALL_CORES,
        ),
        ({}, ALL_CORES),
    ],
)
def test_cores_follow_the_cgroup_quota(tmp_path, files, cores):
    assert hardware._available_cores(root_with(tmp_path, files)) == cores


@pytest.mark.skipif((ALL_CORES or 1) < 2, reason="needs two cores")
def test_a_broken_quota_is_rounded_up(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    assert hardware._available_cores(root_with(tmp_path, files)) == 2


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, MACHINE_BYTES),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/job/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/user/memory.max": f"{GIB}\n",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job/7\n1:name=systemd:/memory\n0::/\n",
                "sys/fs/cgroup/memory/job/7/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            MACHINE_BYTES,
        ),
        ({}, MACHINE_BYTES),
    ],
)
def test_memory_follows_the_cgroup_limit(tmp_path, files, limit):
    assert hardware._available_memory_bytes(root_with(tmp_path, files)) == limit


def test_peak_memory_grows_with_what_is_held():
    before = peak_memory_bytes()
    held = b"x" * (before + 50_000_000)  # more than ever before, so that the peak must move
    after = peak_memory_bytes()
    assert len(held) <= after < len(held) + before + 50_000_000


def test_peak_memory_is_this_programs_own():
    """Not that of the process which started it, as getrusage would have it on Linux."""
    held = b"x" * 400_000_000
    code = "from penstock.hardware import peak_memory_bytes; print(peak_memory_bytes())"
    assert 1_000_000 < int(printed_by(code)) < len(held) // 2


# GPUs


def test_no_gpu_comes_with_the_reason(tmp_path):
    met = probe_with_cards(tmp_path, [])
    assert met["gpus"] == []
    assert "no NVIDIA driver" in met["gpu_note"]
    assert "Driver Not Loaded" in met["gpu_note"]


def test_a_missing_package_is_the_reason(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')")
    assert "pynvml not installed" in json.loads(printed_by(PRINT_PROBE, tmp_path))["gpu_note"]


def test_known_cards_have_their_peaks_and_unknown_ones_none(tmp_path):
    names = ["NVIDIA H200", "Tesla T4", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"]
    met = probe_with_cards(tmp_path, [card(name, memory=11 * GIB, capability=(9, 0)) for name in names])
    assert [gpu["name"] for gpu in met["gpus"]] == names
    assert [gpu["peak_bf16_flops"] for gpu in met["gpus"]] == [989e12, None, None, 165.2e12]
    assert [gpu["memory_bandwidth_bytes_per_second"] for gpu in met["gpus"]] == [4.8e12, 320e9, None, 1008e9]
    assert {gpu["memory_bytes"] for gpu in met["gpus"]} == {11 * GIB}
    assert met["gpus"][0]["compute_capability"] == [9, 0]
    assert met["gpu_note"] == ""


def test_a_card_without_memory_of_its_own_is_left_out_with_the_reason(tmp_path):
    met = probe_with_cards(tmp_path, [card("NVIDIA GB10", memory=None), card("NVIDIA L4")])
    assert [gpu["name"] for gpu in met["gpus"]] == ["NVIDIA L4"]
    assert "NVIDIA GB10" in met["gpu_note"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1,2", ["a", "b", "c"]),
        ("2,0", ["c", "a"]),
        ("", []),
        ("-1", []),
        ("1,9,0", ["b"]),  # CUDA stops at the first that names no card
        ("GPU-bb, GPU-aa", ["b", "a"]),
        ("GPU-", []),  # names three
        ("0,0", ["a"]),
    ],
)
def test_only_visible_gpus_count(tmp_path, visible, names):
    cards = [card("a", uuid="GPU-aa1"), card("b", uuid="GPU-bb2"), card("c", uuid="GPU-cc3")]
    met = probe_with_cards(tmp_path, cards, CUDA_VISIBLE_DEVICES=visible)
    assert [gpu["name"] for gpu in met["gpus"]] == names
    assert ("CUDA_VISIBLE_DEVICES" in met["gpu_note"]) == (len(names) < 3)


def test_the_table_holds_plausible_dense_figures():
    """A slip of the unit, or a figure with sparsity, shows as a ratio of work to bandwidth that no card has."""
    for name, peak in hardware._PEAKS.items():
        assert 100 <= peak.gigabytes_per_second <= 10_000, name
        if peak.bf16_teraflops is not None:
            flops_per_byte = peak.bf16_teraflops * 1e12 / (peak.gigabytes_per_second * 1e9)
            assert 70 <= flops_per_byte <= 430, name
    dense = {"A100-SXM4-80GB": 312, "H100 80GB HBM3": 989, "H100 PCIe": 756, "H200": 989, "B200": 2250, "L4": 121}
    dense |= {"L40S": 362.05, "A10": 125, "GeForce RTX 3090": 71, "GeForce RTX 5090": 209.5, "Tesla T4": None}
    assert {name: hardware._PEAKS[name].bf16_teraflops for name in dense} == dense


def test_the_real_driver_is_asked_where_there_is_one():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pytest.skip("no NVIDIA driver")
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    met = probe()
    assert len(met.gpus) <= count
    assert bool(met.gpus) or met.gpu_note
    for gpu in met.gpus:
        assert gpu.memory_bytes > GIB
        assert gpu.compute_capability >= (3, 0)


# Profiles


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_every_profile_is_a_whole_machine(name):
    met = profile(name)
    assert met.profile == name
    assert met.cpu_cores >= 2
    assert met.memory_bytes >= 8 * GIB
    assert json.loads(json.dumps(met.as_dict())) == met.as_dict()
    kind, size = name.split("-")
    if kind == "cpu":
        assert (met.cpu_cores, met.gpus) == (int(size), ())
    else:
        [gpu] = met.gpus
        nominal = int(size.removesuffix("gb"))
        assert 0.92 * nominal <= gpu.memory_bytes / GIB <= nominal  # what a driver reports is a little less
        assert gpu.peak_bf16_flops is None or gpu.compute_capability >= (8, 0)
        assert not met.gpu_note


def test_the_promised_profiles_exist():
    gpus = [f"gpu-{size}gb" for size in (2, 4, 6, 8, 12, 16, 24, 48, 80, 141)]
    assert set(PROFILE_NAMES) == {"cpu-2", "cpu-8", *gpus}


def test_profiles_agree_with_the_table():
    assert profile("gpu-141gb").gpus[0].peak_bf16_flops == 989e12
    assert profile("gpu-80gb").gpus[0].memory_bandwidth_bytes_per_second == 3.35e12
    assert profile("gpu-16gb").gpus[0].peak_bf16_flops is None


def test_an_unknown_profile_lists_the_known_ones_nearest_first():
    with pytest.raises(ConfigError) as caught:
        profile("gpu-81gb")
    assert "'gpu-81gb'" in caught.value.message
    listed = caught.value.message.partition("one of ")[2].split(", ")
    assert listed[0] in ("gpu-80gb", "gpu-8gb")
    assert sorted(listed) == sorted(PROFILE_NAMES)


# Records


def test_default_workers_are_the_available_cores_and_at_least_one():
    assert default_workers(profile("cpu-8")) == 8
    assert default_workers(profile("cpu-2")) == 2
    nothing = Hardware(
        cpu_name="", cpu_cores=0, memory_bytes=0, gpus=(), gpu_note="", platform="", python="", profile=None
    )
    assert default_workers(nothing) == 1


def test_records_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        profile("cpu-2").cpu_cores = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Gpu("name", 1, (8, 0), None, None)  # type: ignore[misc]
