"""The public names, and what importing them costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import penstock

HEAVY = ["torch", "jax", "pyarrow", "transformers", "numpy", "datasets"]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    return {name.partition(".")[0] for name in json.loads(output.splitlines()[-1])}


def test_importing_penstock_loads_nothing_heavy():
    assert not modules_after("import penstock") & set(HEAVY)


def test_the_command_line_starts_without_frameworks():
    assert not modules_after("import penstock.cli.app") & {"torch", "jax", "pyarrow", "transformers"}


def test_every_public_name_loads_and_is_listed():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_public_names_are_about_a_dozen():
    assert 8 <= len(penstock.__all__) <= 16


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        penstock.no_such_name  # noqa: B018


def test_only_the_torch_loader_needs_torch():
    statement = "from penstock import prepare, open_store, verify, plan_concat, Loader, Tokenizer"
    assert "torch" not in modules_after(statement)
