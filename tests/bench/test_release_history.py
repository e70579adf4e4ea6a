"""The comparison with git on a repository made of releases, here of two small packages that are written in place."""

from __future__ import annotations

import importlib.util
import random
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "release_history.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_history", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def write_wheels(folder: Path, package: str, source: random.Random) -> list[Path]:
    """Three releases: lines change, a file moves, one goes, one is binary."""
    folder.mkdir()
    files = {f"{package}/module{n}.py": [f"line {source.random()}\n" for _ in range(30)] for n in range(12)}
    wheels = []
    for number in range(3):
        for lines in list(files.values())[:5]:
            lines[source.randrange(len(lines))] = f"changed in {number}\n"
        if number:
            files[f"{package}/moved{number}.py"] = files.pop(f"{package}/module{number + 8}.py")
            files[f"{package}/again/module{number}.py"] = files.pop(f"{package}/module{number}.py")  # and changes
            del files[f"{package}/module{number + 5}.py"]
        wheels.append(folder / f"{package}-{number}-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            for path, lines in files.items():
                archive.writestr(path, "".join(lines))
            archive.writestr(f"{package}-{number}.dist-info/METADATA", f"Version: {number}\n")
            archive.writestr(f"{package}/table.bin", bytes([0, number]) * 50)
    return wheels


def test_every_commit_agrees_with_git(script: ModuleType, tmp_path: Path):
    wheels = {package: write_wheels(tmp_path / package, package, random.Random(package)) for package in ("a", "b")}
    repository = tmp_path / "releases.git"
    num_commits = script._import(repository, wheels)
    figures = {row.name: row.value for row in script._compared(repository, wheels, sample=10**6).rows}
    assert figures["commits"] == figures["sampled commits"] == figures["line counts equal to git's"] == num_commits
    assert figures["merges among them"] == 6
    # A release's binary file is in one commit and in the merge.
    assert figures["sampled commits with their whole diff shown"] == num_commits - 12
    assert figures["diffs that give the commit's tree"] == figures["sampled commits with their whole diff shown"]


def test_without_an_index_it_says_so_and_ends_well(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["release_history.py", "--results", str(tmp_path / "results")])
    assert script.main() == 0
    assert capsys.readouterr().out.startswith("skipped: ")
    assert not (tmp_path / "results").exists()
