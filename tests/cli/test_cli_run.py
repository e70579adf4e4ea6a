"""run, train, report: from raw files to a page, in one command, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TINY = [
    "--set=steps=12", "--set=batch_rows=4", "--set=seq_len=64", "--set=eval_every_steps=6", "--set=eval_rows=4",
    "--set=checkpoint_every_steps=6", "--set=model.hidden_size=32", "--set=model.num_layers=2",
    "--set=model.feed_forward_size=64", "--set=sample_tokens=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, corpus, tokenizer_file):
    out = tmp_path_factory.mktemp("run") / "run"
    words = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        str(corpus),
        "--out",
        str(out),
        "--tokenizer",
        str(tokenizer_file),
        *TINY,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_run_leaves_everything_and_says_where(finished_run):
    out, printed = finished_run
    for name in ("manifest.json", "records.jsonl", "config.json", "report.html", "store", "checkpoints"):
        assert (out / name).exists()
    assert "report.html" in printed
    assert "prepare" in printed
    assert "train" in printed
    assert "sample after 12 steps" in printed
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert manifest["status"] == "completed"
    training = manifest["training_report"]["training"]
    assert training["final_train_loss"] < training["first_train_loss"]
    assert manifest["training_parameters"]["total_steps"] == 12
    assert set(manifest["phase_results"]) >= {"prepare", "train"}
    assert manifest["store"]["digest"]


def test_a_second_run_is_a_no_op_that_says_so(finished_run, penstock, corpus, tokenizer_file):
    out, _ = finished_run
    before = (out / "store" / "manifests").iterdir()
    names = sorted(path.name for path in before)
    again = penstock("run", corpus, "--out", out, "--tokenizer", tokenizer_file, *TINY)
    assert "nothing to resume" in again.err
    assert sorted(path.name for path in (out / "store" / "manifests").iterdir()) == names


def test_a_stopped_run_goes_on_to_the_same_losses(finished_run, penstock, store_path, tmp_path):
    out, _ = finished_run
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    store = out / "store"
    printed = penstock("train", "--data", store, "--out", whole, *TINY).err
    table = {line.split()[0]: line for line in printed.partition("step ")[0].splitlines()}
    assert "measured gain" in table["choice"]
    assert "torch finds no usable GPU" in table["device"] or "as set" in table["device"]
    assert {"micro_batch_rows", "attention", "loss_kernel", "optimizer", "compile"} <= set(table)
    penstock("train", "--data", store, "--out", cut, *TINY, "--set", "stop_after_steps=5", expect=130)
    penstock("train", "--data", store, "--out", cut, *TINY, "--resume")

    def losses(folder):
        records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}

    assert losses(whole) == losses(cut)
    assert len(losses(whole)) == 12


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize("is_all_full", [False, True])
def test_a_full_disk_is_one_error_whose_hint_goes_on(
    finished_run, corpus, tokenizer_file, tmp_path, command, is_all_full
):
    """From the last save on there is no space, for the checkpoint alone or for the records too."""
    driver = (
        "import errno, os, sys, penstock.fs as fs\n"
        "is_full = False\n"
        "def refuse(operation, path):\n"
        "    global is_full\n"
        "    is_last_save = 'step-00000012' in path\n"
        "    is_full |= is_last_save\n"
        f"    if operation == 'write' and (is_last_save or is_full and {is_all_full}):\n"
        "        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)\n"
        "if sys.argv[1] == 'full': fs.before_operation = refuse\n"
        "from penstock.cli import main\n"
        "main(sys.argv[2:])\n"
    )
    out = tmp_path / "r"
    data = ["--data", finished_run[0] / "store"] if command == "train" else [corpus, "--tokenizer", tokenizer_file]

    def done(mode, *more):
        words = [sys.executable, "-c", driver, mode, command, *map(str, data), "--out", str(out), *TINY, *more]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    failed = done("full")
    error, hint = failed.stderr.strip().splitlines()[-2:]
    assert failed.returncode == 1
    assert error.startswith("error: ")
    assert "No space left" in error
    ways_on = ["--resume"] if command == "train" else []
    assert hint.startswith("hint: ")
    assert ("--resume" in hint) == bool(ways_on)
    if not is_all_full:
        recorded = json.loads((out / "manifest.json").read_bytes())["message"]
        assert ("--resume" in recorded) == bool(ways_on)
    assert done("empty", *ways_on).returncode == 0
    assert json.loads((out / "manifest.json").read_bytes())["status"] == "completed"


def test_report_is_written_anew(finished_run, penstock):
    out, _ = finished_run
    (out / "report.html").unlink()
    assert "report.html" in penstock("report", out).out
    assert (out / "report.html").stat().st_size > 5000


def test_an_unknown_setting_names_the_nearest(penstock, store_path, tmp_path):
    result = penstock("train", "--data", store_path, "--out", "r", "--set", "learning_rat=1", expect=None)
    result.assert_one_error()
    assert "learning_rate" in result.err
    assert not (tmp_path / "r").exists()


def test_a_failed_run_still_has_a_manifest(penstock, tmp_path, tokenizer_file):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.bin").write_bytes(b"\0\1\2")
    result = penstock("run", "text", "--out", "r", "--tokenizer", tokenizer_file, expect=None)
    assert result.code == 1
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_bytes())
    assert manifest["status"] == "failed"
    assert manifest["failed_phase"] == "prepare"


def test_a_repository_gives_its_history_and_its_figures(penstock, tmp_path, tokenizer_file):
    repository = tmp_path / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    for number in range(3):
        (repository / f"{number}.py").write_text(f"value_{number} = {number}\n" * 40)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", f"Add file {number}"], check=True)
    penstock("run", "--repo", repository, "--out", "r", "--tokenizer", tokenizer_file, *TINY, "--set", "steps=1")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_bytes())
    assert manifest["repository_stats"]["unique_commits"] == 3
    assert manifest["repository_stats"]["insertions"] == 120
    assert manifest["phase_results"]["prepare"]["documents"] == 6  # three commits, three files


def test_a_folder_that_is_no_repository_is_refused_with_the_command_for_folders(penstock, tmp_path):
    (tmp_path / "text").mkdir()
    result = penstock("run", "--repo", "text", "--out", "r", expect=None)
    result.assert_one_error()
    assert "penstock run text" in result.err


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by itself", "by its count", "by policy"],
)
@pytest.mark.parametrize("command", ["train", "run"])
def test_how_long_threads_spin_is_set_before_torch_is_imported(command, given, expected, tmp_path, store_path, corpus):
    driver = (
        "import os, sys\n"
        "class Watcher:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT')); sys.stdout.flush(); os._exit(0)\n"
        "sys.meta_path.insert(0, Watcher())\n"
        "from penstock.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    words = ["train", "--data", str(store_path)] if command == "train" else ["run", str(corpus)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", driver, *words, "--out", str(tmp_path / "r")],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == expected
