"""export, typed as a command."""

from __future__ import annotations

import json

import numpy as np
import pytest


def test_export_says_what_others_rely_on(penstock, store_path, tmp_path):
    facts = penstock("export", store_path, "--format", "bin", "--out", "out", "--json").json
    assert {"format", "out", "files", "documents", "tokens", "bytes", "seconds"} <= facts.keys()
    shown = penstock("inspect", store_path, "--json").json
    assert facts["documents"] == shown["documents"]
    assert facts["tokens"] == shown["tokens"]
    assert facts["digest"] == shown["digest"]
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert facts["files"] == len(files)
    assert facts["bytes"] == sum(path.stat().st_size for path in files)
    assert len(np.fromfile(tmp_path / "out" / "train.bin", "<u2")) == shown["splits"]["train"]["tokens"]


def test_export_of_an_older_version_by_name(penstock, store_path, tmp_path):
    result = penstock("export", f"{store_path}@1", "--format", "jsonl", "--split", "val", "--out", "out")
    assert result.err == ""
    assert "version 1" in result.out
    lines = (tmp_path / "out" / "val.jsonl").read_text().splitlines()
    assert all(json.loads(line)["metadata"]["split"] == "val" for line in lines)
    penstock("export", f"{store_path}@7", "--format", "bin", "--out", "x", expect=1).assert_one_error()


def test_rows_are_counted(penstock, store_path, tmp_path):
    facts = penstock("export", store_path, "--format", "arrow", "--seq-len", 64, "--out", "out", "--json").json
    rows = sum(-(-part["tokens"] // 64) for part in facts["splits"].values())
    assert facts["rows"] == rows


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "josnl"],
        ["--format", "bin", "--seq-len", "8"],
        ["--format", "chunks", "--seq-len", "-5"],
        ["--format", "bin", "--split", "nope"],
        ["--format", "arrow", "--pack", "spiral", "--seq-len", "8"],
    ],
    ids=" ".join,
)
def test_a_wrong_request_is_one_error(penstock, store_path, tmp_path, arguments):
    penstock("export", store_path, *arguments, "--out", "out", expect=1).assert_one_error()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_store_is_one_error(penstock, tmp_path):
    penstock("export", "nowhere", "--format", "bin", "--out", "out", expect=1).assert_one_error()


def test_an_existing_export_needs_force(penstock, store_path, tmp_path):
    command = ["export", store_path, "--format", "bin", "--split", "val", "--out", "out"]
    penstock(*command)
    refused = penstock(*command, expect=1)
    refused.assert_one_error()
    assert "--force" in refused.err
    penstock(*command, "--force")
