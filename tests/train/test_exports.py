from __future__ import annotations

from importlib import import_module
from pathlib import Path

import penstock.train


def test_every_public_name_is_there_whatever_was_imported_before() -> None:
    folder = Path(penstock.train.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.endswith("_kernel")}  # those need Triton
    modules.remove("__init__")
    for module in modules:
        import_module(f"penstock.train.{module}")
    assert modules.isdisjoint(penstock.train.__all__)
    assert all(callable(getattr(penstock.train, name)) for name in penstock.train.__all__)
