"""Data is never code (torture G): the package's own source names nothing that would run data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.torture(lane="G", sample=True)

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "penstock"
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("yaml", "load"), ("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen")}
FORBIDDEN_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}
FORBIDDEN_METHODS = {"extractall"}
# `.pt` files are an export that users ask for (docs/exports.md): plain tensors, written there and read nowhere.
ALLOWED_CALLS = {("export/chunks.py", "torch.save()")}
WRITING_CALLS = {"write_text", "write_bytes", "tofile", "savez", "memmap"}


def problems(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            found += [f"{where} {alias.name}" for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(f"{where} {node.module}")
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(f"{where} {node.func.id}()")
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if (owner, node.func.attr) in FORBIDDEN_ATTRIBUTES or node.func.attr in FORBIDDEN_METHODS:
                    found.append(f"{where} {owner}.{node.func.attr}()")
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_KEYWORDS and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append(f"{where} {keyword.arg}=")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_in_the_package_runs_data(path: Path):
    place = path.relative_to(PACKAGE).as_posix()
    assert [found for found in problems(path) if (place, found.split(" ")[1]) not in ALLOWED_CALLS] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_done_inside_an_assert(path: Path):
    """`python -O` leaves asserts out: what they call must not matter, and what comes from outside is never their
    business. Types are narrowed by some, which call nothing."""
    asserts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    calling = [node.lineno for node in asserts if any(isinstance(inner, ast.Call) for inner in ast.walk(node))]
    assert calling == []
    if path.parent.name in ("store", "load"):
        assert asserts == [], "damage must be found under python -O too"


def test_the_check_itself_finds_what_it_looks_for(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle\neval('1')\nyaml.load(x)\nrun(shell=True)\nload(allow_pickle=True)\ntar.extractall()\n"
    )
    assert len(problems(bad)) == 6


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_fs_writes_files(path: Path):
    if path.name == "fs.py" or "bench" in path.parts:
        return  # the benchmarks write peers' formats through the peers' own code
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in WRITING_CALLS, f"{path.name}:{node.lineno} {node.func.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            modes = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            assert not any(set("wax+") & set(str(mode)) for mode in modes), (
                f"{path.name}:{node.lineno} open for writing"
            )
