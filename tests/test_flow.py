"""The arrows of the tree point one way: a module imports its own folder, the foundation, and stages to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "penstock"
FOUNDATION = ["errors", "hashing", "fs", "hardware", "runlog"]
FLOW = ["engines", "sources", "tokenize", "store", "pack", "load", "export", "train", "report", "bench", "cli"]
MODULES = sorted(PACKAGE.rglob("*.py"))


def home_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_homes(path: Path) -> set[tuple[str, int]]:
    """The top-level parts of penstock that a module imports, at its top or inside its functions, with the line."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written from the top"
            if node.module == "penstock":
                names = [f"penstock.{alias.name}" for alias in node.names]
            elif node.module:
                names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {(name.split(".")[1], node.lineno) for name in names if name.startswith("penstock.")}
    return found


def test_every_folder_has_a_place_in_the_flow():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert folders == set(FLOW)
    assert files == set(FOUNDATION)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path):
    home = home_of(path)
    if home in ("__init__", "__main__"):
        return  # the public names and the entry point reach everything, lazily
    order = [*FOUNDATION, *FLOW]
    for other, line in imported_homes(path):
        if other == "__version__":
            continue
        assert other in order, f"{path}:{line} imports penstock.{other}, which has no place in the flow"
        allowed = order.index(other) <= order.index(home)
        assert allowed, f"{path.relative_to(PACKAGE)}:{line}: {home} imports {other}, to its right"


@pytest.mark.parametrize("path", sorted((PACKAGE / "report").glob("*.py")), ids=lambda path: path.name)
def test_report_needs_no_framework(path: Path):
    source = ast.parse(path.read_text())
    names = {
        alias.name.split(".")[0] for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {(node.module or "").split(".")[0] for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    assert not names & {"torch", "jax", "transformers"}
