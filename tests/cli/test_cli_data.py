"""prepare, inspect, verify, plan: what the issue says must hold, typed as commands."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def test_digest_is_the_same_for_any_workers_and_units(penstock, corpus, tokenizer_file, tmp_path):
    common = ["prepare", corpus, "--tokenizer", tokenizer_file, "--json"]
    one = penstock(*common, "--out", "s1", "--workers", 1, "--unit-bytes", 20_000).json
    two = penstock(*common, "--out", "s2", "--workers", 2, "--unit-bytes", 20_000).json
    other = penstock(*common, "--out", "s3", "--workers", 2, "--unit-bytes", 70_000).json
    assert one["digest"] == two["digest"] == other["digest"]
    assert one["units"] == two["units"] > 4
    assert other["units"] < one["units"]
    found = penstock("verify", "s1", "--json").json
    assert (found["ok"], found["problems"], found["quick"]) == (True, [], False)


def test_prepare_says_what_others_rely_on(penstock, corpus, tokenizer_file, tmp_path):
    facts = penstock("prepare", corpus, "--out", "s", "--tokenizer", tokenizer_file, "--json").json
    keys = {"store", "version", "documents", "tokens", "bytes", "seconds", "units", "digest", "skipped"}
    assert keys <= facts.keys()
    found = sum(len(files) for _, _, files in os.walk(corpus))
    assert facts["documents"] + sum(facts["skipped"].values()) == found == facts["found"]
    assert facts["skipped"]["empty"] == 1
    assert facts["skipped"]["binary"] == 1


def test_a_real_folder_adds_up(penstock, tmp_path):
    folder = Path("/usr/share/doc")
    if not folder.is_dir():
        pytest.skip("no /usr/share/doc here")
    facts = penstock("prepare", folder, "--out", "s", "--vocab-size", 300, "--json").json
    found = sum(
        len(files) + sum(os.path.islink(os.path.join(parent, name)) for name in folders)
        for parent, folders, files in os.walk(folder)
    )
    assert facts["documents"] + sum(facts["skipped"].values()) == found


def test_a_store_inside_its_own_input_is_no_part_of_it(penstock, corpus, tokenizer_file, tmp_path):
    own = Path(shutil.copytree(corpus, tmp_path / "own" / corpus.name))
    options = ["--tokenizer", tokenizer_file, "--json"]
    outside = penstock("prepare", own, "--out", "s", *options).json
    inside = penstock("prepare", own, "--out", own / "made" / "s", *options).json
    again = penstock("prepare", own, "--out", own / "made" / "s", *options).json
    assert inside["digest"] == again["digest"] == outside["digest"]
    assert inside["skipped"] == again["skipped"] == outside["skipped"]
    assert (inside["version"], again["version"]) == (1, 1)


def test_one_more_repository_moves_no_document(penstock, tokenizer_file, tmp_path):
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C"]
    for name in ("first", "second"):
        subprocess.run(["git", "init", "-q", str(tmp_path / name)], check=True)
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"file {number} of the {name} repository\n" * 5)
        subprocess.run([*git, str(tmp_path / name), "add", "."], check=True)
        subprocess.run([*git, str(tmp_path / name), "commit", "-qm", "Add"], check=True)
    options = ["--out", "s", "--tokenizer", tokenizer_file, "--split", "train=50,val=50"]
    penstock("prepare", "git:first", *options)
    penstock("prepare", "git:first", "git:second", *options)
    penstock("prepare", "git:second", *options)
    assert penstock("diff", "s", 1, 2, "--json").json["split_changed"]["documents"] == 0
    assert penstock("diff", "s", 2, 3, "--json").json["split_changed"]["documents"] == 0
    penstock("prepare", "git:first", "git:second", *options, "--git-group", "root")
    penstock("prepare", "git:first", *options)
    assert penstock("diff", "s", 4, 5, "--json").json["split_changed"]["documents"] == 0


def test_one_flipped_byte_anywhere_is_named(penstock, corpus, tokenizer_file, tmp_path):
    penstock("prepare", corpus, "--out", "s", "--tokenizer", tokenizer_file)
    files = sorted(path for path in (tmp_path / "s").rglob("*") if path.is_file() and path.stat().st_size)
    chosen = random.Random(7).sample(files, 5)
    for path in chosen:
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[len(damaged) // 2] ^= 0x10
        path.write_bytes(damaged)
        result = penstock("verify", "s", "--json", expect=1).json
        assert not result["ok"]
        assert str(path.relative_to(tmp_path / "s")) in {problem["file"] for problem in result["problems"]}
        path.write_bytes(original)
    assert penstock("verify", "s").code == 0


def test_a_token_names_its_file_and_bytes(penstock, store_path, tmp_path):
    facts = penstock("inspect", store_path, "--token", 1234, "--json").json
    data = Path(facts["file"]).read_bytes()[facts["byte_start"] : facts["byte_end"]]
    assert data.decode() == facts["text"]
    assert facts["exact"]


def test_inspect_shows_counts_documents_and_rows(penstock, store_path, corpus, tmp_path):
    facts = penstock("inspect", store_path, "--json").json
    assert {"documents", "tokens", "digest", "splits", "tokenizer"} <= facts.keys()
    assert sum(part["tokens"] for part in facts["splits"].values()) == facts["tokens"]
    document = penstock("inspect", store_path, "--doc", 2, "--json").json
    assert Path(document["file"]).read_text() == document["text"]
    row = penstock("inspect", store_path, "--row", 1, "--seq-len", 64, "--json").json
    assert sum(each["row_end"] - each["row_start"] for each in row["documents"]) == 64
    assert "not-included" not in penstock("inspect", store_path).out


def test_plan_counts_rows(penstock, store_path, tmp_path):
    facts = penstock("plan", store_path, "--seq-len", 100, "--json").json
    assert facts["rows"] == -(-(facts["tokens"] - 1) // 100)
    assert facts["waste_tokens"] == facts["rows"] * 100 + 1 - facts["tokens"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["prepare", "no-such-folder", "--out", "s"],
        ["prepare", "empty", "--out", "s"],
        ["prepare", "text", "--out", "s", "--tokenizer", "text/a.txt"],
        ["prepare", "text", "--out", "s", "--tokenizer", "missing.json"],
        ["prepare", "text", "--out", "text"],
        ["prepare", "text", "--out", "text/a.txt"],
        ["prepare", "text", "--out", "s", "--split", "train=x"],
        ["prepare", "text", "--out", "s", "--dedup", "nearly"],
        ["prepare", "text", "--out", "s", "--secrets", "hide"],
        ["prepare", "text", "other/text", "--out", "s"],
        ["prepare", "git:somewhere", "--out", "s"],
        ["verify", "text"],
        ["inspect", "missing"],
        ["plan", "missing"],
        ["report", "text"],
        ["doctor", "--profile", "gpu-5gb"],
    ],
    ids=lambda words: " ".join(words),
)
def test_bad_input_is_one_error_one_hint_and_changes_nothing(penstock, tmp_path, arguments):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text\n")
    (tmp_path / "other" / "text").mkdir(parents=True)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    penstock(*arguments, expect=None).assert_one_error()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_hints_are_about_what_was_met(penstock, tmp_path, tokenizer_file):
    """Each names a way out that is one: no command that would be refused again, no filter that left nothing out."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "picture.bin").write_bytes(bytes(range(256)))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".text").write_text("some text\n")
    for verb in ("verify", "plan", "inspect"):
        assert "--out other" not in penstock(verb, "other", expect=1).err
        assert "--out missing" in penstock(verb, "missing", expect=1).err
    penstock("prepare", "hidden", "--hidden", "--out", "made", "--tokenizer", tokenizer_file)
    assert "--out" not in penstock("verify", "made@1", expect=1).err
    assert "--hidden" in penstock("prepare", "hidden", "--out", "s", "--tokenizer", tokenizer_file, expect=1).err
    assert "--hidden" not in penstock("prepare", "other", "--out", "s", "--tokenizer", tokenizer_file, expect=1).err
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "none.csv").write_text("text\n")
    for words, wanted, unwanted in (
        (["rows.jsonl", "--id-field", "number"], "--id-field", "--include"),
        (["none.csv"], "no rows in", "no files"),
    ):
        met = penstock("prepare", "--out", "s", "--tokenizer", tokenizer_file, *words, expect=1)
        assert wanted in met.err
        assert unwanted not in met.err


def test_a_column_of_bytes_is_taken_as_the_hint_says(penstock, tmp_path, tokenizer_file):
    pq.write_table(pa.table({"text": pa.array([b"some text", b"more"], pa.binary())}), tmp_path / "t.parquet")
    words = ["prepare", "t.parquet", "--out", "s", "--tokenizer", tokenizer_file, "--json"]
    assert "--text-field text" in penstock(*words, expect=1).err
    assert penstock(*words, "--text-field", "text").json["documents"] == 2


@pytest.mark.parametrize(
    "arguments", [["prepare"], ["no-such-verb"], ["prepare", "x"], ["plan", "x", "--seq-len", "y"]]
)
def test_bad_usage_exits_2(penstock, tmp_path, arguments):
    result = penstock(*arguments, expect=2)
    assert result.err.startswith("error: ")
    assert "hint: " in result.err


def test_a_full_disk_is_one_error_and_the_rerun_goes_on(corpus, tokenizer_file, tmp_path):
    """Answers every write with 'no space left' from the 9th on, in the real command."""
    driver = (
        "import errno, os, sys, penstock.fs as fs\n"
        "count = 0\n"
        "def full(operation, path):\n"
        "    global count\n"
        "    count += operation == 'write'\n"
        "    if count > 8: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)\n"
        "if sys.argv[1] == 'full': fs.before_operation = full\n"
        "from penstock.cli import main\n"
        "main(sys.argv[2:])\n"
    )
    words = [
        "prepare",
        corpus,
        "--out",
        tmp_path / "s",
        "--tokenizer",
        tokenizer_file,
        "--unit-bytes",
        "20000",
        "--json",
    ]

    def run(mode: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", driver, mode, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    failed = run("full")
    lines = failed.stderr.strip().splitlines()
    assert failed.returncode == 1
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]
    assert "No space left" in lines[0] or "bytes left, about" in lines[0]
    assert run("rest").returncode == 0
    assert not list((tmp_path / "s").rglob("*.tmp-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("module", ["typer", "penstock.cli.app", "penstock.store.preparation"])
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_signal_during_the_imports_is_told_like_any_other(corpus, tmp_path, number, code, module, is_taken_over):
    """Modules in C may turn the exception into one of their own."""
    driver = (
        "import os, sys\n"
        "class Signaller:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name != {module!r}: return\n"
        "        sys.meta_path.remove(self)\n"
        f"        try: os.kill(os.getpid(), {int(number)})\n"
        f"        except BaseException as error: raise ImportError if {is_taken_over} else error\n"
        "sys.meta_path.insert(0, Signaller())\n"
        "from penstock.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", driver, "prepare", str(corpus), "--out", str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    assert "run the same command again" in done.stderr
    assert not (tmp_path / "s").exists()


def test_an_interrupted_command_that_begins_anew_says_no_more_than_that(penstock, corpus, tokenizer_file, tmp_path):
    penstock("prepare", corpus, "--out", "s", "--tokenizer", tokenizer_file)
    driver = (
        "import os, signal, sys, penstock.store.reader as reader\n"
        "reader.read_manifest = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from penstock.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", driver, "inspect", str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == 143
    assert done.stderr.splitlines()[-1] == "hint: run the same command again"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_prepare_says_how_to_go_on(corpus, tokenizer_file, tmp_path, number, code, workers):
    """The process, or one of its workers, signals it in the middle of the work, so that no clock is involved."""
    driver = (
        "import os, sys, penstock.fs as fs\n"
        "count, main_process = 0, os.getpid()\n"
        "def interrupt(operation, path):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count == 20:\n"
        "        try: os.mkdir(sys.argv.pop())\n"
        "        except FileExistsError: return\n"
        f"        os.kill(main_process, {int(number)})\n"
        "fs.before_operation = interrupt\n"
        "from penstock.cli import main\n"
        "main(sys.argv[1:-1])\n"
    )
    words = ["prepare", corpus, "--out", tmp_path / "s", "--tokenizer", tokenizer_file, "--unit-bytes", "10000"]
    words += ["--workers", workers]
    command = [sys.executable, "-c", driver, *map(str, words), str(tmp_path / "signalled")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert "run the same command again; it goes on where it was" in done.stderr
    again = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words), "--json"], capture_output=True, check=True
    )
    assert b'"digest"' in again.stdout


def test_hostile_names_cannot_drive_the_terminal(penstock, tmp_path, tokenizer_file):
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in (b"\x1b[31mred.txt", b"new\nline.txt", b"\xff\xfe.txt", b"--help", b"quote'\".txt"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text(f"text of {name!r}\n")
    (folder / "\x1b[2Jempty.txt").write_text("")
    facts = penstock("prepare", folder, "--out", "s", "--tokenizer", tokenizer_file, "--json").json
    assert facts["documents"] == 5
    shown = penstock("inspect", "s")
    assert "\x1b" not in shown.out + shown.err
    for number in range(5):
        assert "\x1b" not in penstock("inspect", "s", "--doc", number).out


def test_help_has_examples(penstock, tmp_path):
    for verb in ("run", "prepare", "inspect", "plan", "train", "bench", "doctor"):
        assert "Example" in penstock(verb, "--help").out
    assert "penstock 0" in penstock("--version").out


def test_debug_shows_the_traceback(penstock, tmp_path):
    result = penstock("--debug", "verify", "nothing-here", expect=1)
    assert "Traceback" in result.err
    assert "error: " in result.err


def test_a_size_for_a_vocabulary_that_is_given_is_refused(penstock, corpus, tokenizer_file, tmp_path):
    words = ["prepare", corpus, "--out", tmp_path / "s", "--tokenizer", tokenizer_file, "--vocab-size", 400]
    refused = penstock(*words, expect=1)
    refused.assert_one_error()
    assert "--vocab-size 400" in refused.err
    assert not (tmp_path / "s").exists()


def test_a_store_that_keeps_another_vocabulary_says_so(penstock, corpus):
    words = ["prepare", corpus, "--out", "s", "--json"]
    made = penstock(*words, "--vocab-size", 400).json["tokenizer"]
    again = penstock(*words, "--vocab-size", made["vocab_size"])
    assert "keeps its tokenizer" not in again.err
    other = penstock(*words, "--vocab-size", 500)
    assert f"keeps its tokenizer of {made['vocab_size']} ids" in other.err
    assert other.json["tokenizer"] == made


def test_the_end_token_of_a_trained_vocabulary_is_the_one_asked_for(penstock, corpus, tmp_path):
    words = ["prepare", corpus, "--vocab-size", 400, "--json", "--out", "s"]
    made = penstock(*words, "--end-token", "<end>").json["tokenizer"]
    assert made["control_tokens"] == {"<end>": made["end_id"]}
    assert not penstock(*words, "--end-token", "<end>").json["committed"]
    assert not penstock(*words).json["committed"]
    refused = penstock(*words, "--end-token", "<other>", expect=1)
    refused.assert_one_error()
    assert "<end>" in refused.err
    (tmp_path / "chat.jsonl").write_text('{"prompt": "Two and two?", "completion": "Four."}\n')
    chat = ["prepare", "chat.jsonl", "--template", "chatml", "--end-token", "<end>", "--out", "c", "--json"]
    assert "<end>" in penstock(*chat).json["tokenizer"]["control_tokens"]
    assert penstock("inspect", "c", "--doc", 0, "--json").json["text"].endswith("<|im_end|>\n")


def test_a_vocabulary_says_the_size_that_it_got(penstock, tmp_path):
    (tmp_path / "small.txt").write_text("a few words\n")
    tokenizer = penstock("prepare", "small.txt", "--out", "s", "--json").json["tokenizer"]
    assert tokenizer["vocab_size"] < 300
    assert str(tokenizer["vocab_size"]) in tokenizer["origin"]
