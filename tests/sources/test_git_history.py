"""Commits and snapshots: compared with git itself on a history with everything odd in it."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError, InputError
from penstock.sources import DEFAULT_UNIT_BYTES, FileOptions, GitOptions, GitSource, InputOptions, sources_from_inputs
from penstock.sources.document import Document, SkipTally
from penstock.sources.git.repository import Clone, make_clone, new_clone_name
from penstock.store import PrepareOptions, document_text, open_store, prepare, verify

CLEAN = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
PERSON = "Ada Lovelace <ada@example.org>"
ODD_NAMES = [
    b"new\nline.txt",
    b'quo"te.txt',
    b"tab\there.txt",
    b"caf\xe9.txt",
    "naïve 汉字.txt".encode(),
    b"-dash.txt",
    b"--output=x",
    b"back\\slash.txt",
    b"esc\x1b[31m.txt",
    b" lead and trail ",
    b"diff --git a",
]
SPECIAL = b"<|endoftext|> <s> [INST] </s> <|im_start|>\n"


def content_of(document: Document) -> bytes:
    (part,) = document.parts
    return part.data


def git(folder: Path, *arguments: str, data: bytes | None = None, check: bool = True, **variables: str) -> bytes:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env={**CLEAN, **variables}, input=data, check=check, capture_output=True
    )
    return done.stdout


def quoted(path: bytes) -> bytes:
    return b'"' + b"".join(bytes([b]) if 32 <= b < 127 and b not in b'"\\' else b"\\%03o" % b for b in path) + b'"'


@dataclass
class Writer:
    """A fast-import stream, one commit at a time; remembers the files of each branch."""

    stream: list[bytes] = field(default_factory=list)
    files: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    count: int = 0

    def commit(
        self,
        branch: str,
        message: bytes,
        changes: list[bytes],
        *,
        parent: str | None = None,
        merges: tuple[str, ...] = (),
    ) -> str:
        self.count += 1
        seconds = 1_500_000_000 + 60 * self.count
        lines = [b"commit refs/heads/%s" % branch.encode(), b"mark :%d" % self.count]
        lines += [b"committer %s %d +0100" % (PERSON.encode(), seconds), b"data %d\n%s" % (len(message), message)]
        lines += [b"from %s" % parent.encode()] if parent else []
        lines += [b"merge %s" % merged.encode() for merged in merges]
        self.stream.append(b"\n".join([*lines, *changes]) + b"\n\n")
        return f":{self.count}"

    @staticmethod
    def write(path: bytes, data: bytes, mode: bytes = b"100644") -> bytes:
        return b"M %s inline %s\ndata %d\n%s" % (mode, quoted(path), len(data), data)


def write_history(folder: Path, *, num_commits: int, seed: int = 1) -> Path:
    """A bare repository with roots, merges, an octopus, renames, binary files, odd names, reverts, links, tags."""
    rng = random.Random(seed)
    words = [line for line in Path(json.__file__).read_bytes().split(b"\n") if line.strip()]
    writer = Writer()

    def text(lines: int) -> list[bytes]:
        return [rng.choice(words) for _ in range(lines)]

    files = {b"src/f%d.py" % number: text(40) for number in range(12)}
    first = [writer.write(path, b"\n".join(lines) + b"\n") for path, lines in files.items()]
    first += [writer.write(name, b"odd %d\n" % number + SPECIAL) for number, name in enumerate(ODD_NAMES)]
    first += [writer.write(b"logo.png", bytes(range(256)) * 4), writer.write(b"empty", b"")]
    first += [
        writer.write(b"link", b"src/f0.py", b"120000"),
        writer.write(b"copy.py", b"\n".join(files[b"src/f0.py"]) + b"\n"),
    ]
    first += [writer.write(b"latin.txt", "caf\xe9\n".encode("latin-1")), writer.write(b".hidden", b"x\n")]
    first += [writer.write(b"vendor/lib.js", b"y\n"), b"M 160000 %s sub" % (b"1" * 40)]
    tip = writer.commit("main", b"Root commit\n\n" + SPECIAL, first)
    for number in range(num_commits):
        kind = number % 20
        subject = b"Change %d (#%d)\n\nGH-%d\nFixes: abc%d\nSigned-off-by: %s\n" % (
            number, number, number, number, PERSON.encode(),
        )  # fmt: skip
        changed = []
        for path in rng.sample(sorted(files), rng.choice([1, 1, 2, 4])):
            lines = files[path]
            place = rng.randrange(len(lines) + 1)
            lines[place : place + rng.randrange(4)] = text(rng.randrange(1, 5))
            changed.append(writer.write(path, b"\n".join(lines) + (b"\n" if rng.random() < 0.8 else b"")))
        if kind == 3:
            old = rng.choice(sorted(files))
            new = b"moved/%d-%s" % (number, old.rpartition(b"/")[2])
            files[new] = files.pop(old)
            changed = [b"R %s %s" % (quoted(old), quoted(new))]
        elif kind == 5:
            changed.append(writer.write(b"logo.png", rng.randbytes(600)))
            changed.append(writer.write(b"latin.txt", b"\xe9 %d\n" % number))
        elif kind == 7:
            changed.append(writer.write(rng.choice(ODD_NAMES), b"odd %d\n" % number))
        elif kind == 9:
            changed = [b"D link"] if number % 40 == 9 else [writer.write(b"link", b"src/f%d.py" % number, b"120000")]
        elif kind == 11:
            subject = b'Revert "Change %d"\n\nThis reverts commit %s.\n' % (number, b"ab" * 20)
            changed.append(writer.write(b"link", b"now a file\n" * (number % 3)))
        elif kind == 13:
            changed = []
        if kind in (15, 17):
            sides = []
            for side in range(2 if kind == 15 else 3):
                own = writer.write(b"side%d/%d.txt" % (side, number), b"\n".join(text(5)) + b"\n")
                sides.append(writer.commit(f"side{side}", b"Side work", [own], parent=tip))
            tip = writer.commit("main", b"Merge", changed, parent=sides[0], merges=tuple(sides[1:]))
        elif kind == 19 and number % 40 == 19:
            other = writer.commit("other", b"Another root", [b"deleteall", writer.write(b"o%d" % number, b"o\n")])
            tip = writer.commit("main", b"Join", [writer.write(b"o%d" % number, b"o\n")], parent=tip, merges=(other,))
        else:
            tip = writer.commit("main", subject, changed, parent=tip)
    writer.stream.append(b"tag v1\nfrom :5\ntagger %s 1500000000 +0000\ndata 3\none\n" % PERSON.encode())
    writer.stream.append(b"reset refs/tags/light\nfrom :2\n\n")
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "--bare", "-b", "main")
    git(folder, "fast-import", "--quiet", "--force", data=b"".join(writer.stream))
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_history(tmp_path_factory.mktemp("git") / "odd.git", num_commits=120)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder of our own, which must be empty in the end."""
    folder = tmp_path_factory.mktemp("temporary")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    yield folder
    tempfile.tempdir = before
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def clone(repository: Path, temporary: Path) -> Iterator[Clone]:
    made = make_clone(str(repository), name=new_clone_name(), network=False)
    yield made
    made.close()


def read_all(source: GitSource, unit_bytes: int = DEFAULT_UNIT_BYTES) -> tuple[list[Document], SkipTally]:
    tally = SkipTally()
    documents = []
    try:
        for unit in source.units(unit_bytes):
            text = source.read(unit)
            documents += text.documents
            tally.merge([unit.skips, text.skips])
    finally:
        source.close()
    return documents, tally


def commits_of(documents: list[Document]) -> dict[str, Document]:
    return {json.loads(d.facts)["commit"]: d for d in documents if b"/commits/" in d.key}


@pytest.fixture(scope="module")
def everything(repository: Path, temporary: Path) -> tuple[list[Document], SkipTally]:
    return read_all(GitSource(name="odd", place=str(repository)))


def numstat_of(clone: Clone, commit: str) -> list[tuple[int, int]]:
    """What `git show --numstat` says in the same bare clone; of a merge, against its first parent."""
    shown = clone.output("show", "--numstat", "-z", "--format=", "-m", "--first-parent", commit)
    rows = [row.split(b"\t") for row in shown.split(b"\0") if row.count(b"\t") >= 2]
    return [(int(row[0]), int(row[1])) if row[0] != b"-" else (0, 0) for row in rows]


def odd_and_some(commits: dict[str, Document], *, every: int) -> list[str]:
    """A few commits of each odd kind, and every so many-th of all."""
    odd: dict[tuple, str] = {}
    for commit, document in commits.items():
        facts = json.loads(document.facts)
        odd[len(facts["parents"]), "renames" in facts, "binary_files" in facts, "diff_start" in facts] = commit
    return sorted({*odd.values(), *sorted(commits)[::every]})


def check_against_git(clone: Clone, commits: dict[str, Document], sample: list[str]) -> dict[str, int]:
    """Numbers equal git's, and every diff applies to the parent's tree and gives the commit's."""
    seen = dict.fromkeys(("root", "merge", "rename", "binary", "applied"), 0)
    for commit in sample:
        document = commits[commit]
        facts = json.loads(document.facts)
        rows = numstat_of(clone, commit)
        expected = (len(rows), sum(row[0] for row in rows), sum(row[1] for row in rows))
        assert (facts["files"], facts["insertions"], facts["deletions"]) == expected, commit
        if len(facts["parents"]) < 2:  # the command of the issue, word for word
            plain = clone.output("show", "--numstat", "--format=", commit).splitlines()
            assert len(plain) == facts["files"]
        seen["root"] += not facts["parents"]
        seen["merge"] += facts["is_merge"]
        seen["rename"] += "renames" in facts
        seen["binary"] += "binary_files" in facts
        if "diff_start" in facts and "diffs_left_out" not in facts:
            check_applies(clone, facts, content_of(document)[facts["diff_start"] :])
            seen["applied"] += 1
    return seen


def check_applies(clone: Clone, facts: dict, patch: bytes) -> None:
    index = {**clone.environment, "GIT_INDEX_FILE": str(clone.folder / "index")}

    def run(*arguments: str, data: bytes = b"") -> bytes:
        done = subprocess.run(clone.command(*arguments), input=data, capture_output=True, env=index, check=False)
        assert done.returncode == 0, (facts["commit"], done.stderr, patch)
        return done.stdout

    run("read-tree", *([facts["parents"][0]] if facts["parents"] else ["--empty"]))
    run("apply", "--cached", "--whitespace=nowarn", data=patch)
    assert run("write-tree") == run("rev-parse", facts["commit"] + "^{tree}")


def test_numbers_equal_git_show_and_diffs_apply(clone: Clone, everything: tuple[list[Document], SkipTally]):
    commits = commits_of(everything[0])
    assert set(commits) == set(clone.output("rev-list", "--branches", "--tags").decode().split())
    seen = check_against_git(clone, commits, odd_and_some(commits, every=6))
    assert all(seen.values()), seen


@pytest.mark.torture(lane="F")
def test_numbers_equal_git_show_on_a_long_history(tmp_path: Path, temporary: Path):
    repository = write_history(tmp_path / "long.git", num_commits=5000)
    commits = commits_of(read_all(GitSource(name="long", place=str(repository)))[0])
    assert len(commits) > 5000
    made = make_clone(str(repository), name=new_clone_name(), network=False)
    seen = check_against_git(made, commits, odd_and_some(commits, every=len(commits) // 200))
    made.close()
    assert all(seen.values()), seen


def test_commits_come_oldest_first_with_their_facts(clone: Clone, everything: tuple[list[Document], SkipTally]):
    facts = [json.loads(d.facts) for d in everything[0] if b"/commits/" in d.key]
    place = {fact["commit"]: number for number, fact in enumerate(facts)}
    assert all(place[parent] < place[fact["commit"]] for fact in facts for parent in fact["parents"])
    by_commit = {fact["commit"]: fact for fact in facts}
    tip = clone.output("rev-parse", "main").decode().strip()
    tagged = clone.output("rev-parse", "v1^{commit}").decode().strip()
    assert "main" in by_commit[tip]["branches"]
    assert by_commit[tagged]["tags"] == ["v1"]
    change = next(fact for fact in facts if "#4" in fact.get("issues", []))
    assert change["issues"] == ["#4", "GH-4", "abc4"]
    assert change["time"] == clone.output(
        "show", "-s", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ", change["commit"]
    ).decode().strip()  # fmt: skip
    reverts = [fact for fact in facts if fact["is_revert"]]
    assert len(reverts) == 6
    assert {fact["reverts"] for fact in reverts} == {"ab" * 20}
    assert max(len(fact["parents"]) for fact in facts) == 3
    assert sum(not fact["parents"] for fact in facts) > 1


def test_identities_stay_out_unless_asked_for(repository: Path, temporary: Path):
    def text_with(authors: str, key: str = "") -> bytes:
        options = GitOptions(authors=authors, author_key=key, parts=("commits",), max_commits=30)
        documents, _ = read_all(GitSource(name="odd", place=str(repository), options=options))
        return b"".join(content_of(document) + document.facts.encode() for document in documents)

    dropped, hashed, kept = text_with("drop"), text_with("hash"), text_with("keep")
    for text in (dropped, hashed):
        assert b"Lovelace" not in text
        assert b"ada@" not in text
    assert b"Signed-off-by" not in dropped
    assert b"Signed-off-by: " in hashed
    assert f"Author: {PERSON}".encode() in kept
    assert f"Signed-off-by: {PERSON}".encode() in kept
    assert text_with("hash", "key") != hashed


def test_files_are_those_of_the_tree_by_the_rules_of_files(
    repository: Path, clone: Clone, everything: tuple[list[Document], SkipTally], tmp_path: Path
):
    documents, tally = everything
    files = {d.path: d for d in documents if b"/files/" in d.key}
    for path, document in files.items():
        facts = json.loads(document.facts)
        assert content_of(document) == clone.output("cat-file", "blob", facts["blob"])
        assert (document.exact, document.byte_start, document.byte_end) == (True, 0, len(content_of(document)))
        assert document.key == b"odd/files/" + path
    tree = clone.output("ls-tree", "-r", "-z", "HEAD").split(b"\0")[:-1]
    left_out = sum(count for reason, count in tally.counts.items())
    assert len(files) + left_out == len(tree)
    assert list(files) == sorted(files)
    for reason in ("submodule", "hidden", "vendored", "not-utf8", "binary", "empty"):
        assert tally.counts[reason] == 1, reason
    assert len({d.facts for d in files.values()}) == len(files)


def test_the_same_blob_is_one_document(tmp_path: Path, temporary: Path):
    writer = Writer()
    same = [writer.write(path, b"same\n") for path in (b"b.txt", b"a.txt", b".c", b"z/a.txt")]
    writer.commit("main", b"one", [*same, writer.write(b"l", b"a.txt", b"120000")])
    folder = tmp_path / "r"
    folder.mkdir()
    git(folder, "init", "-q", "--bare", "-b", "main")
    git(folder, "fast-import", "--quiet", data=b"".join(writer.stream))
    documents, tally = read_all(GitSource(name="r", place=str(folder), options=GitOptions(parts=("files",))))
    assert [document.path for document in documents] == [b"a.txt"]
    assert tally.counts == {"hidden": 1, "same-blob": 2, "symlink": 1}
    files = FileOptions(include=("z/",), max_file_bytes=5)
    documents, tally = read_all(
        GitSource(name="r", place=str(folder), files=files, options=GitOptions(parts=("files",)))
    )
    assert [document.path for document in documents] == [b"z/a.txt"]


@pytest.mark.parametrize("unit_bytes", [1, 5_000, 60_000])
def test_documents_are_the_same_for_any_unit_size_order_and_process(
    unit_bytes: int, repository: Path, everything: tuple[list[Document], SkipTally]
):
    source = GitSource(name="odd", place=str(repository))
    units = list(source.units(unit_bytes))
    copy = pickle.loads(pickle.dumps(source))
    texts = {number: (source, copy)[number % 2].read(unit) for number, unit in reversed(list(enumerate(units)))}
    copy.close()
    assert source.read(units[0]) == texts[0]  # a copy's end takes nothing away
    source.close()
    found = [document for number in range(len(units)) for document in texts[number].documents]
    assert found == everything[0]
    assert len({unit.fingerprint for unit in units}) == len(units)
    again = GitSource(name="odd", place=str(repository))
    assert [unit.fingerprint for unit in again.units(unit_bytes)] == [unit.fingerprint for unit in units]
    again.close()


def test_only_wanted_documents_are_read(repository: Path, everything: tuple[list[Document], SkipTally]):
    wanted = {document.key for document in everything[0][::7]}
    source = GitSource(name="odd", place=str(repository))
    found = [d for unit in source.units(50_000) for d in source.read(unit, wanted=wanted.__contains__).documents]
    source.close()
    assert found == [document for document in everything[0] if document.key in wanted]


@pytest.mark.parametrize("limit", [0, 200, 3000])
def test_diffs_beyond_the_limit_are_left_out_by_file(
    limit: int, repository: Path, everything: tuple[list[Document], SkipTally]
):
    options = GitOptions(max_diff_bytes=limit, parts=("commits",))
    small, _ = read_all(GitSource(name="odd", place=str(repository), options=options))
    whole = commits_of(everything[0])
    left_out = 0
    for commit, document in commits_of(small).items():
        facts, full = json.loads(document.facts), json.loads(whole[commit].facts)
        assert [facts[name] for name in ("files", "insertions", "deletions")] == [
            full[name] for name in ("files", "insertions", "deletions")
        ]
        assert len(content_of(document)) - facts.get("diff_start", len(content_of(document))) <= limit
        reasons = facts.get("diffs_left_out", {})
        left_out += reasons.get("too-large", 0)
        assert content_of(document).count(b"(diff left out: too large)") == reasons.get("too-large", 0)
    assert left_out


def test_a_diff_larger_than_memory_should_hold_streams_by(tmp_path: Path, temporary: Path):
    """Files beside it are kept, and the lines of what was left out are counted all the same."""
    writer = Writer()
    long_lines = b"".join(b"%d %s\n" % (number, b"x" * 200) for number in range(20_000))
    changes = [
        writer.write(b"a.txt", b"small\n"),
        writer.write(b"b.txt", long_lines),
        writer.write(b"c.txt", b"y" * 3_000_000),
        writer.write(b"d.txt", b"diff --git a/x b/x\n+++ b\n--- a\n@@ -1 +1 @@\n"),
    ]
    writer.commit("main", b"large", changes)
    writer.commit("main", b"after", [writer.write(b"a.txt", b"changed\n")], parent=":1")
    folder = tmp_path / "r"
    folder.mkdir()
    git(folder, "init", "-q", "--bare", "-b", "main")
    git(folder, "fast-import", "--quiet", data=b"".join(writer.stream))
    options = GitOptions(max_diff_bytes=10_000, parts=("commits",))
    (large, after), _ = read_all(GitSource(name="r", place=str(folder), options=options))
    facts = json.loads(large.facts)
    assert (facts["files"], facts["insertions"], facts["deletions"]) == (4, 20_006, 0)
    assert facts["diffs_left_out"] == {"too-large": 2}
    lines = content_of(large).split(b"\n")
    assert b"A +20000 -0 b.txt (diff left out: too large)" in lines
    assert b"A +1 -0 c.txt (diff left out: too large)" in lines
    assert b"+small" in lines
    assert b"++++ b" in lines
    assert b"-small" in content_of(after).split(b"\n")


def test_content_that_is_shown_is_chosen(repository: Path, temporary: Path):
    def one(*content: str) -> Document:
        options = GitOptions(content=content, parts=("commits",), max_commits=25)
        documents, _ = read_all(GitSource(name="odd", place=str(repository), options=options))
        return next(d for d in documents if json.loads(d.facts)["files"] and not json.loads(d.facts)["is_merge"])

    full = json.loads(one("message", "stats", "diff").facts)
    stats_only = one("stats")
    assert b"diff --git" not in content_of(stats_only)
    assert [json.loads(stats_only.facts)[name] for name in ("insertions", "deletions")] == [
        full[name] for name in ("insertions", "deletions")
    ]
    assert content_of(one("diff")).startswith((b"diff --git", b"A binary", b"M binary"))
    assert b"diff --git" not in content_of(one("message"))


def test_groups_follow_renames_in_one_repository_and_roots_in_several(
    repository: Path, tmp_path: Path, temporary: Path
):
    writer = Writer()
    lines = b"".join(b"line %d\n" % number for number in range(50))
    writer.commit("main", b"one", [writer.write(b"old.py", lines), writer.write(b"x.txt", b"x\n")])
    writer.commit("main", b"two", [b"R old.py new.py"], parent=":1")
    writer.commit("main", b"three", [writer.write(b"new.py", lines + b"more\n")], parent=":2")
    for name in ("r", "fork"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q", "--bare", "-b", "main")
        git(tmp_path / name, "fast-import", "--quiet", data=b"".join(writer.stream))
    fork = Writer(count=3)
    fork.commit("main", b"forked", [writer.write(b"y.txt", b"y\n")], parent="refs/heads/main^0")
    git(tmp_path / "fork", "fast-import", "--quiet", data=fork.stream[0])
    (alone,) = sources_from_inputs([f"git:{tmp_path}/r"])
    documents, _ = read_all(alone)
    groups = {d.path if b"/files/" in d.key else content_of(d)[:3]: d.group for d in documents}
    assert groups[b"new.py"] == groups[b"two"] == groups[b"thr"] == groups[b"one"] == b"r/files/old.py"
    assert groups[b"x.txt"] == b"r/files/x.txt"
    both = sources_from_inputs([f"git:{tmp_path}/r", f"git:{tmp_path}/fork"])
    assert len({document.group for source in both for document in read_all(source)[0]}) == 1


def test_a_ref_chooses_history_and_files(repository: Path, clone: Clone, temporary: Path):
    for ref in ("v1", "refs/heads/main~30", clone.output("rev-parse", "main~3").decode().strip()):
        (source,) = sources_from_inputs([f"some=git:{repository}#{ref}"])
        documents, _ = read_all(source)
        assert set(commits_of(documents)) == set(clone.output("rev-list", ref).decode().split())
        at = clone.output("rev-parse", ref + "^{commit}").decode().strip()
        assert {json.loads(d.facts)["commit"] for d in documents if b"/files/" in d.key} == {at}


def test_newest_commits_only(repository: Path, clone: Clone, temporary: Path):
    options = GitOptions(max_commits=7, parts=("commits",))
    assert len(read_all(GitSource(name="o", place=str(repository), options=options))[0]) == 7
    day = "2017-07-14T04:00:00+00:00"
    options = GitOptions(since=day, parts=("commits",))
    documents, _ = read_all(GitSource(name="o", place=str(repository), options=options))
    assert set(commits_of(documents)) == set(
        clone.output("rev-list", "--branches", "--tags", f"--since={day}").decode().split()
    )
    assert 0 < len(documents) < 120


def test_a_shallow_clone_keeps_its_border_free_of_false_additions(repository: Path, tmp_path: Path, temporary: Path):
    git(tmp_path, "clone", "-q", "--depth=3", f"file://{repository}", "shallow", GIT_ALLOW_PROTOCOL="file")
    documents, _ = read_all(
        GitSource(name="s", place=str(tmp_path / "shallow"), options=GitOptions(parts=("commits",)))
    )
    border = [d for d in documents if json.loads(d.facts).get("changes_left_out") == "shallow-boundary"]
    assert border
    for document in border:
        assert b"diff --git" not in content_of(document)
        assert json.loads(document.facts)["files"] == 0
        assert json.loads(document.facts)["parents"]
    whole = commits_of(read_all(GitSource(name="s", place=str(repository)))[0])
    assert [content_of(d) for d in documents if d not in border] == [
        content_of(whole[json.loads(d.facts)["commit"]]) for d in documents if d not in border
    ]


@pytest.mark.parametrize("filtered", ["blob:none", "tree:0"])
def test_a_partial_clone_is_read_as_far_as_it_goes(filtered: str, repository: Path, tmp_path: Path, temporary: Path):
    git(repository, "config", "uploadpack.allowFilter", "true")
    arguments = ("clone", "-q", "--bare", f"--filter={filtered}", f"file://{repository}", "partial")
    git(tmp_path, *arguments, GIT_ALLOW_PROTOCOL="file")
    before = sorted((tmp_path / "partial" / "objects").rglob("*"))
    documents, tally = read_all(
        GitSource(name="p", place=str(tmp_path / "partial"), options=GitOptions(parts=("commits",)))
    )
    facts = [json.loads(document.facts) for document in documents]
    assert len(documents) == len(git(repository, "rev-list", "--all").split())
    assert sum(fact.get("changes_left_out") == "missing-object" for fact in facts) > 100
    assert sorted((tmp_path / "partial" / "objects").rglob("*")) == before
    if filtered == "blob:none":
        _, tally = read_all(GitSource(name="p", place=str(tmp_path / "partial"), options=GitOptions(parts=("files",))))
        assert tally.counts["missing-object"] > 10


def test_worktrees_submodules_and_bare_repositories(repository: Path, tmp_path: Path, temporary: Path):
    git(tmp_path, "clone", "-q", str(repository), "work", check=False)
    git(tmp_path / "work", "worktree", "add", "-q", "-f", "--no-checkout", str(tmp_path / "tree"), "v1", check=False)
    git(tmp_path, "init", "-q", "above")
    git(
        tmp_path / "above",
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        str(repository),
        "sub",
        check=False,
    )
    options = GitOptions(parts=("commits",), max_commits=5)
    for place in ("work", "work/.git", "tree", "above/sub"):
        (source,) = sources_from_inputs([f"git:{tmp_path / place}"], options=InputOptions(git=options))
        assert source.name == place.removesuffix("/.git").rpartition("/")[2]
        assert len(read_all(source)[0]) == 5


def test_sha256_repositories(tmp_path: Path, temporary: Path):
    git(tmp_path, "init", "-q", "-b", "main", "--object-format=sha256", "long")
    folder = tmp_path / "long"
    (folder / "a").write_text("a\n")
    git(folder, "add", "a")
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
    git(folder, "commit", "-q", "-m", "one", **names)
    documents, _ = read_all(GitSource(name="long", place=str(folder)))
    assert [len(document.key) for document in documents] == [len("long/commits/") + 64, len("long/files/a")]


def test_forged_and_ancient_objects(tmp_path: Path, temporary: Path):
    """What git itself would not write today: no author, times from beyond, other charsets, NULs, doubled names."""
    git(tmp_path, "init", "-q", "-b", "main", "forged")
    folder = tmp_path / "forged"

    def store(kind: str, data: bytes) -> bytes:
        return git(folder, "hash-object", "-t", kind, "-w", "--stdin", "--literally", data=data).strip()

    blob, other = store("blob", b"text\n"), store("blob", b"other\n")
    entries = [b"100644 a\0" + bytes.fromhex(name.decode()) for name in (other, blob)]
    tree = store("tree", b"".join(entries))
    head = b"tree %s\n" % tree
    person = b"N <n@e> 99999999999999999 +0000\n"
    names = []
    for body in (
        head + b"\nno author at all\n",
        head + b"author " + person + b"committer " + person + b"\nfar future\n",
        head + b"author x\ncommitter\nencoding ISO-8859-1\n\ncaf\xe9\n",
        head + b"author N <n@e> 1 +0000\ncommitter N <n@e> -1 +0000\nencoding punycode\n\n\xff\0nul\n",
        head + b"author N <n@e> 1 +0000\ncommitter N <n@e> 1 +0000\ngpgsig x\n y\n\n",
    ):
        parent = b"parent %s\n" % names[-1] if names else b""
        names.append(store("commit", body.replace(head, head + parent, 1)))
    git(folder, "update-ref", "refs/heads/main", names[-1].decode())
    git(folder, "tag", "tree-tag", tree.decode())
    git(folder, "tag", "blob-tag", blob.decode())
    documents, tally = read_all(GitSource(name="f", place=str(folder)))
    texts = [content_of(document) for document in documents]
    assert texts[0].startswith(b"no author at all\n")
    assert texts[2] == "café\n".encode()
    assert texts[3] == "\ufffd\ufffdnul\n".encode()
    assert tally.counts == {"same-path": 1, "empty": 1}
    assert json.loads(documents[1].facts)["time"] is None


@pytest.mark.parametrize(
    ("make", "word", "says"),
    [
        ("none", "git:{}", "isn't a git repository"),
        ("none", "git:{}/missing", "doesn't exist"),
        ("none", "git:", "names no repository"),
        ("empty", "git:{}", "has no commits"),
        ("odd", "git:{}#nowhere", "no ref 'nowhere'"),
        ("odd", "git:{}#--all", "no ref '--all'"),
        ("odd", "git:{}#v1^{{tree}}", "no ref"),
        ("unborn", "git:{}", "HEAD"),
        ("corrupt", "git:{}", "git stopped at commit"),
        ("incomplete", "git:{}", "can't be cloned"),
    ],
)
def test_errors_are_one_clear_line(make: str, word: str, says: str, repository: Path, tmp_path: Path, temporary: Path):
    folder = tmp_path / "there"
    folder.mkdir()
    if make == "empty":
        git(folder, "init", "-q")
    elif make in ("odd", "unborn", "corrupt", "incomplete"):
        folder.rmdir()
        git(tmp_path, "clone", "-q", "--bare", "--no-hardlinks", str(repository), str(folder))
    if make == "unborn":
        git(folder, "symbolic-ref", "HEAD", "refs/heads/nothing")
    if make == "incomplete":
        lost = git(folder, "rev-parse", "HEAD^{tree}").decode().strip()
        (pack,) = (folder / "objects" / "pack").glob("*.pack")
        moved = pack.rename(tmp_path / "pack")
        pack.with_suffix(".idx").unlink()
        git(folder, "unpack-objects", "-q", data=moved.read_bytes())
        (folder / "objects" / lost[:2] / lost[2:]).unlink()
    if make == "corrupt":
        (pack,) = (folder / "objects" / "pack").glob("*.pack")
        pack.chmod(0o644)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
        pack.write_bytes(data)
    with pytest.raises(InputError) as raised:
        read_all(*sources_from_inputs([word.format(folder)]))
    assert says in raised.value.message
    assert "\n" not in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": ("commit",)}, {"parts": ()}, {"content": ("",)}, {"authors": "show"}, {"group": "x"},
        {"since": "yesterday"}, {"max_commits": 0}, {"max_diff_bytes": -1},
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(wrong: dict):
    with pytest.raises(ConfigError):
        GitOptions(**wrong)


def test_options_that_change_documents_change_the_digest():
    def options(**changed) -> dict:
        return GitSource(name="x", place="/x", options=replace(GitOptions(), **changed)).options()

    for changed in (
        {"parts": ("files",)}, {"content": ("diff",)}, {"authors": "keep"}, {"max_diff_bytes": 5}, {"max_commits": 3},
        {"since": "2024-01-01"}, {"group": "root"},
    ):  # fmt: skip
        assert options(**changed) != options()
    assert options(authors="hash", author_key="a") != options(authors="hash", author_key="b")
    assert "secret" not in str(options(authors="hash", author_key="secret"))


def test_prepared_history_has_no_control_token_but_the_ends(
    repository: Path, tmp_path: Path, tokenizer, temporary: Path
):
    digests = set()
    for number, (unit_bytes, workers) in enumerate([(DEFAULT_UNIT_BYTES, 1), (20_000, 2)]):
        (source,) = sources_from_inputs([f"git:{repository}"])
        options = PrepareOptions(unit_bytes=unit_bytes, workers=workers)
        out = tmp_path / f"store{number}"
        try:
            digests.add(prepare([source], out, tokenizer=tokenizer, options=options).manifest.digest)
        finally:
            source.close()
        assert verify(out) == []
    assert len(digests) == 1
    controls = set(tokenizer.spec.control_tokens.values())
    with open_store(out) as store:
        texts = 0
        for number in range(len(store.arrays["length"])):
            tokens = store.document_tokens(number)
            begin = len(tokenizer.spec.begin_ids)
            assert not controls & set(tokens[begin:-1].tolist())
            texts += SPECIAL.decode() in document_text(store, number, tokenizer)
        assert texts > 2
