"""Our reading of a history against git's own, on a repository made of real releases.

    python benchmarks/release_history.py [--work FOLDER] [--results FOLDER] [--releases N] [--sample N]
    python benchmarks/release_history.py --repository PATH [--sample N]

pip downloads wheels of some packages (by name and version, from the index that pip is configured for; nothing in them
is run), about 250 MB. Each package is a branch: from one release to the next, the changed files are committed a few at
a time, with moved files in one commit, then merged into `main`. So contents, changes and moves are real; how they are
cut into commits, and their messages and times, are made here. Of the commits a sample is drawn, and for each

    lines inserted and deleted in our documents' facts     equal those of `git show --numstat` against its first parent
    the diff in our text, applied to its parent's tree     gives its tree, to the object id

Where no index can be reached it says so on one line and ends with status 0. With `--repository` the same is asked of a
history that is there already, in a bare clone of it; that table is shown and written nowhere. Memory: the rendered text
of all commits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench import format_table, write_result
from penstock.bench.result import BenchResult, Role, Row, completed, ratio_to
from penstock.sources import Document
from penstock.sources.git import GitOptions, GitSource

ROOT = Path(__file__).resolve().parent.parent
# Pure Python, small, with many releases.
PACKAGES = ("setuptools", "pip", "pylint", "sphinx", "networkx", "pytest", "rich", "fastapi")
RELEASES = 30
DOWNLOADS_AT_ONCE = 4
FILES_PER_COMMIT = 3
NEEDED_COMMITS = 5000
SAMPLE = 200
UNIT_BYTES = 16 * 2**20
FIRST_SECOND, SECONDS_APART = 1_500_000_000, 3600


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="penstock-releases-") as temporary:
        folder = arguments.work or Path(temporary)
        if arguments.repository is not None:
            return _show_given(arguments.repository, folder / "clone.git", sample=arguments.sample)
        fs.make_folder(folder / "wheels")
        wheels = _downloaded(folder / "wheels", arguments.releases)
        if not wheels:
            print("skipped: no package index can be reached, and this repository is made of downloaded releases")
            return 0
        repository = folder / "releases.git"
        if repository.exists():
            fs.remove_tree(repository)
        commits = _import(repository, wheels)
        print(f"{commits} commits of {sum(map(len, wheels.values()))} releases", file=sys.stderr)
        settings = {
            "repository": "made of real releases: contents and changes are theirs, commits are cut and merged here",
            "packages": [f"{package} ({len(releases)} releases)" for package, releases in wheels.items()],
        }
        result = _compared(repository, settings, sample=arguments.sample)
    shown = completed(result, command="python benchmarks/release_history.py")
    print(format_table(shown), f"written to {write_result(shown, arguments.results).name}", sep="\n")
    return 0 if all(each.met is not False for each in result.ratios) else 1


def _show_given(place: Path, clone: Path, *, sample: int) -> int:
    """Compares on a clone of a repository, in which nothing of the repository's own config runs."""
    _git(clone, "init", "--quiet", "--bare", str(clone))
    _git(clone, "fetch", "--quiet", "--no-tags", str(place.resolve()), "+HEAD:refs/heads/main")
    _git(clone, "symbolic-ref", "HEAD", "refs/heads/main")
    result = _compared(clone, {"repository": "a clone of a given one"}, sample=sample)
    print(format_table(completed(result, command="python benchmarks/release_history.py --repository PATH")))
    return 0 if all(each.met is not False for each in result.ratios[1:]) else 1  # however few commits there are


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repository", type=Path, help="compares on this repository; nothing is downloaded or written")
    parser.add_argument("--work", type=Path, help="keeps the wheels and the repository here")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the figures go")
    parser.add_argument("--releases", type=int, default=RELEASES, help=f"of each package (default: {RELEASES})")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"commits that are compared (default: {SAMPLE})")
    return parser.parse_args()


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _downloaded(folder: Path, count: int) -> dict[str, list[Path]]:
    """Wheels by package, the oldest release first; without those that the index doesn't have as a pure wheel."""
    found: dict[str, list[Path]] = {}
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        for package in PACKAGES:
            versions = _versions(package)[:count][::-1]
            if not versions and not found:
                return {}
            wheels = pool.map(lambda version, package=package: _wheel(folder, package, version), versions)
            found[package] = [wheel for wheel in wheels if wheel is not None]
    return {package: wheels for package, wheels in found.items() if wheels}


def _versions(package: str) -> list[str]:
    """Its releases, the newest first; none where the index isn't there."""
    lines = _pip("index", "versions", package, "--timeout", "20", "--retries", "1").stdout.splitlines()
    listed = [line.partition(":")[2] for line in lines if line.startswith("Available versions:")]
    return [version.strip() for version in listed[0].split(",")] if listed else []


def _wheel(folder: Path, package: str, version: str) -> Path | None:
    place = folder / f"{package}-{version}"
    if not any(place.glob("*.whl")):
        _pip("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(place), f"{package}=={version}")
    return next(iter(sorted(place.glob("*-none-any.whl"))), None)


@dataclass(kw_only=True)
class _Branch:
    """A package's files as last committed, and which of them `main` hasn't got yet."""

    name: str
    files: dict[str, str] = field(default_factory=dict)
    unmerged: dict[str, str | None] = field(default_factory=dict)


class _Stream:
    """A conversation with `git fast-import`: blobs are named by marks, each content once."""

    def __init__(self, repository: Path) -> None:
        self._environment = _git_environment(repository)
        _git(repository, "init", "--quiet", "--bare", "--initial-branch=main", str(repository))
        command = ["git", "-C", str(repository), "fast-import", "--quiet"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=self._environment)
        self._marks: dict[str, int] = {}
        self.num_commits = 0

    def blob(self, data: bytes) -> str:
        """The digest by which a content is named from now on."""
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if digest not in self._marks:
            self._marks[digest] = len(self._marks) + 1
            self._write(b"blob\nmark :%d\ndata %d\n%s\n" % (self._marks[digest], len(data), data))
        return digest

    def commit(self, branch: str, message: str, changes: dict[str, str | None], *, merged: str = "") -> None:
        """Adds a commit; a file without a content is deleted."""
        seconds, text = FIRST_SECOND + SECONDS_APART * self.num_commits, message.encode()
        self._write(b"commit refs/heads/%s\n" % branch.encode())
        self._write(b"committer Releases <releases@example.org> %d +0000\ndata %d\n%s\n" % (seconds, len(text), text))
        if merged:
            self._write(b"merge refs/heads/%s\n" % merged.encode())
        for path, digest in changes.items():
            quoted = b'"%s"' % path.encode().replace(b"\\", b"\\\\").replace(b'"', b'\\"')
            mark = b"D %s\n" % quoted if digest is None else b"M 100644 :%d %s\n" % (self._marks[digest], quoted)
            self._write(mark)
        self._write(b"\n")
        self.num_commits += 1

    def close(self) -> None:
        """Waits until all is written."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            raise RuntimeError(f"git fast-import ended with status {self._process.returncode}")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)


def _import(repository: Path, wheels: dict[str, list[Path]]) -> int:
    """Makes the repository; returns its number of commits."""
    stream = _Stream(repository)
    stream.commit("main", "Begin", {"README": stream.blob(b"Releases of several packages.\n")})
    branches = {package: _Branch(name=package) for package in wheels}
    for number in range(max(map(len, wheels.values()))):
        for package, releases in wheels.items():
            if number < len(releases):
                _add_release(stream, branches[package], releases[number])
    stream.close()
    return stream.num_commits


def _add_release(stream: _Stream, branch: _Branch, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    files = {path: stream.blob(data) for path, data in _files(wheel, branch.name)}
    changed: dict[str, str | None] = {path: new for path, new in files.items() if branch.files.get(path) != new}
    changed |= dict.fromkeys(branch.files.keys() - files.keys())
    for part in _parts(changed, branch.files):
        places = ", ".join(sorted({path.rpartition("/")[2] for path in part})[:3])
        stream.commit(branch.name, f"{branch.name} {version}: {places}\n", part)
    branch.files = files
    branch.unmerged |= changed
    stream.commit("main", f"Merge {branch.name} {version}\n", branch.unmerged, merged=branch.name)
    branch.unmerged = {}


def _files(wheel: Path, package: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file of a wheel; its own folder of facts without the version in its name."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            first, _, rest = entry.filename.partition("/")
            if entry.is_dir() or ".." in entry.filename or entry.filename.startswith("/"):
                continue
            facts = "dist-info" if first.endswith(".dist-info") else first
            yield f"{package}/{facts}/{rest}" if rest else f"{package}/{first}", archive.read(entry)


def _parts(changed: dict[str, str | None], before: dict[str, str]) -> Iterator[dict[str, str | None]]:
    """A release's changes a few files at a time, by path; a file that went and came elsewhere in one commit."""
    partner = _moves(changed, before)
    left, part = dict(sorted(changed.items())), {}
    while left:
        path = next(iter(left))
        part[path] = left.pop(path)
        if path in partner:
            part[partner[path]] = left.pop(partner[path])
        if len(part) >= FILES_PER_COMMIT:
            yield part
            part = {}
    if part:
        yield part


def _moves(changed: dict[str, str | None], before: dict[str, str]) -> dict[str, str]:
    """Old path <-> new path of files that moved: of the same content, else of the same name where just one has it."""
    gone = sorted(path for path, digest in changed.items() if digest is None)
    came = sorted(path for path, digest in changed.items() if digest is not None and path not in before)
    partner: dict[str, str] = {}
    for old_key, new_key in ((before.get, changed.get), (_file_name, _file_name)):
        old_by_key, new_by_key = _by_key(gone, old_key, partner), _by_key(came, new_key, partner)
        for key in sorted(old_by_key.keys() & new_by_key.keys()):
            old, new = old_by_key[key], new_by_key[key]
            if old_key is not _file_name or len(old) == len(new) == 1:
                for one, other in zip(old, new, strict=False):
                    partner |= {one: other, other: one}
    return partner


def _by_key(paths: list[str], key: Callable[[str], str | None], taken: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        if path not in taken:
            found.setdefault(key(path) or "", []).append(path)
    return found


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


def _compared(repository: Path, settings: dict[str, Any], *, sample: int) -> BenchResult:
    source = GitSource(name="releases", place=str(repository), options=GitOptions(parts=("commits",)))
    documents: dict[str, Document] = {}
    for unit in source.units(UNIT_BYTES):
        documents |= {
            document.path.decode().removeprefix("commits/"): document for document in source.read(unit).documents
        }
    source.close()
    chosen = random.Random(3).sample(sorted(documents), min(sample, len(documents)))
    counted = [_counts_are_equal(repository, name, json.loads(documents[name].facts)) for name in chosen]
    applied = [_applies(repository, name, documents[name]) for name in chosen]
    whole = [each for each in applied if each is not None]
    megabytes = sum(document.byte_end for document in documents.values()) / 1e6
    figures = {
        "commits": len(documents),
        "sampled commits": len(chosen),
        "merges among them": sum(bool(json.loads(documents[name].facts)["is_merge"]) for name in chosen),
        "commits with moved files among them": sum(_moves_files(repository, name) for name in chosen),
        "line counts equal to git's": counted.count(True),
        "sampled commits with their whole diff shown": len(whole),
        "diffs that give the commit's tree": whole.count(True),
    }
    rows = [Row(name=name, unit="commits", role=Role.OURS, values=(float(value),)) for name, value in figures.items()]
    by_name = {row.name: row for row in rows}
    ratios = [
        ratio_to("commits to 5,000", by_name["commits"], NEEDED_COMMITS),
        ratio_to("line counts equal to git's, of the sample", by_name["line counts equal to git's"], len(chosen)),
        ratio_to("diffs that apply, of those shown whole", by_name["diffs that give the commit's tree"], len(whole)),
    ]
    settings = {
        **settings,
        "rendered": f"{megabytes:.1f} MB",
        "compared with": "git show --numstat -M against the first parent; git apply on its tree",
    }
    return BenchResult(benchmark="git-history", settings=settings, rows=rows, ratios=ratios)


def _moves_files(repository: Path, commit: str) -> bool:
    shown = _git(repository, "show", "--summary", "-M", "-m", "--first-parent", "--format=", commit)
    return b"\n rename " in b"\n" + shown


def _counts_are_equal(repository: Path, commit: str, facts: dict[str, Any]) -> bool:
    shown = _git(repository, "show", "--numstat", "-M", "-m", "--first-parent", "--format=", commit).splitlines()
    counts = [line.split(b"\t")[:2] for line in shown if line]
    sums = [sum(int(each[side]) for each in counts if each[side] != b"-") for side in (0, 1)]
    return [facts["insertions"], facts["deletions"]] == sums and facts["files"] == len(counts)


def _applies(repository: Path, commit: str, document: Document) -> bool | None:
    """Whether the diff in a document leads from the parent's tree to the commit's; None where files were left out."""
    facts = json.loads(document.facts)
    if "diffs_left_out" in facts or "changes_left_out" in facts or "diff_start" not in facts:
        return None
    patch = b"".join(part.data for part in document.parts)[facts["diff_start"] :]
    parents = _git(repository, "rev-list", "--parents", "--max-count=1", commit).split()[1:]
    with tempfile.TemporaryDirectory(prefix="penstock-index-") as folder:
        index = str(Path(folder, "index"))
        _git(repository, "read-tree", parents[0].decode() if parents else "--empty", index=index)
        _git(repository, "apply", "--cached", "--whitespace=nowarn", "-", index=index, data=patch)
        tree = _git(repository, "write-tree", index=index)
    return tree == _git(repository, "rev-parse", f"{commit}^{{tree}}")


def _git_environment(repository: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(repository),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }


def _git(repository: Path, *words: str, index: str = "", data: bytes = b"") -> bytes:
    place = [] if words[0] == "init" else ["-C", str(repository)]
    environment = _git_environment(repository) | ({"GIT_INDEX_FILE": index} if index else {})
    return subprocess.run(
        ["git", *place, *words], env=environment, input=data, stdout=subprocess.PIPE, check=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
