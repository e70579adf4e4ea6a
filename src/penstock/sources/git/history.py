"""Git history and file snapshots (docs/git.md).

In: a repository. Out: one document per commit (`NAME/commits/HASH`), in topological order, oldest first, and one per
distinct blob of the tree at a ref (`NAME/files/PATH`). Every tree entry is a document or is counted under a reason:

    symlink · submodule · hidden · vendored · not-included · excluded · too-large · same-blob · same-path
    missing-object                                                                                      (unread)
    empty · binary · not-utf8                                                                      (after reading)

Each commit is compared with its first parent, a root commit with the empty tree. A first pass over the trees (no file
contents) decides the units and follows renames, so that a unit's text has a bound before it is read: four times the
unit size plus one commit's diff. Memory beyond that: the ids of commits and the paths that ever were.
"""

from __future__ import annotations

import datetime
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InputError
from penstock.hashing import canonical_json, digest_of, strong_hash
from penstock.sources.document import Document, Part, SkipTally
from penstock.sources.files import FileOptions
from penstock.sources.git.objects import (
    Ask,
    Change,
    Diff,
    DiffReader,
    DiffRequest,
    GitStoppedError,
    ObjectReader,
    SizeReader,
    failed,
)
from penstock.sources.git.rendering import TEMPLATE_VERSION, Identities, parse_commit, render_commit
from penstock.sources.git.repository import (
    Clone,
    find_clone,
    is_url,
    make_clone,
    new_clone_name,
    remove_dead_clones,
    without_secret,
)
from penstock.sources.hygiene import RULES_VERSION, VENDORED_FOLDERS, PathRules, content_problem, language_of
from penstock.sources.source import Unit, UnitText

__all__ = ["BlobItem", "CommitItem", "GitOptions", "GitSource"]

PARTS = ("commits", "files")
CONTENT = ("message", "stats", "diff")
AUTHORS = ("drop", "hash", "keep")
GROUPS = ("auto", "path", "root", "commit")
DEFAULT_MAX_DIFF_BYTES = 2**20

SURVEY_COMMITS = 512
# What a commit is expected to take besides its diff, and a changed file besides the bytes it grew or shrank by.
COMMIT_BYTES = 512
CHANGE_BYTES = 1024
# A unit ends early when its diffs could be this many times the unit size.
BOUND_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class GitOptions:
    """What of a repository becomes documents.

    Attributes:
        parts: commits, files.
        content: of a commit, which of message, stats, diff are shown.
        authors: drop, hash or keep identities.
        author_key: key of the hash.
        max_diff_bytes: of a commit's diff, the files that don't fit are left out.
        since: only commits from this day on (ISO date, UTC).
        max_commits: only the newest ones.
        group: what stays in one split: path, root, commit; auto: path for one repository, root for several.
    """

    parts: tuple[str, ...] = PARTS
    content: tuple[str, ...] = CONTENT
    authors: str = "drop"
    author_key: str = ""
    max_diff_bytes: int = DEFAULT_MAX_DIFF_BYTES
    since: str | None = None
    max_commits: int | None = None
    group: str = "auto"

    def __post_init__(self) -> None:
        for option, values, known in (("--git-parts", self.parts, PARTS), ("--git-content", self.content, CONTENT)):
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                raise ConfigError(f"{option} {','.join(values)!r} isn't known", hint=f"choose from {','.join(known)}")
        for option, value, choices in (("--git-authors", self.authors, AUTHORS), ("--git-group", self.group, GROUPS)):
            if value not in choices:
                raise ConfigError(f"{option} {value!r} isn't known", hint=f"choose from {', '.join(choices)}")
        if self.max_diff_bytes < 0 or (self.max_commits is not None and self.max_commits < 1):
            raise ConfigError(
                "--git-max-diff-bytes is less than 0 or --git-max-commits less than 1", hint="give a larger number"
            )
        self.since_seconds()

    def since_seconds(self) -> int | None:
        """`since` as seconds since 1970."""
        if self.since is None:
            return None
        try:
            day = datetime.datetime.fromisoformat(self.since)
        except ValueError:
            raise ConfigError(f"--git-since {self.since!r} isn't a date", hint="write it as 2024-01-31") from None
        return int((day if day.tzinfo else day.replace(tzinfo=datetime.UTC)).timestamp())


@dataclass(frozen=True, slots=True)
class CommitItem:
    """One commit of a unit: what to compare it with, its group, and why its changes can't be known."""

    commit: bytes
    parent: bytes | None
    group: bytes
    problem: str


@dataclass(frozen=True, slots=True)
class BlobItem:
    """One file of a unit."""

    blob: bytes
    path: bytes
    size: int
    group: bytes
    at_commit: bytes


class GitSource:
    """A repository's commits and the files at a ref.

    Args:
        name: first part of the documents' keys.
        place: path, or an https URL.
        ref: whose history and files; None: all branches and tags, and the files at HEAD.
        options: what becomes a document.
        files: filters of the files.
        network: whether a URL may be opened.
    """

    def __init__(
        self,
        *,
        name: str,
        place: str,
        ref: str | None = None,
        options: GitOptions | None = None,
        files: FileOptions | None = None,
        network: bool = False,
    ) -> None:
        self.name = name
        self._place = place
        self._ref = ref
        self._options = options or GitOptions()
        self._files = files or FileOptions()
        self._network = network
        self._rules = PathRules(include=self._files.include, exclude=self._files.exclude)
        self._identities = Identities(rule=self._options.authors, key=self._options.author_key)
        self._content = frozenset(self._options.content)
        # Known to every copy of this source, so that worker processes find the clone that the first process made.
        self._clone_name = new_clone_name()
        self._opened: _Opened | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Data only: another process opens its own."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opened=None, _lock=threading.Lock())

    @property
    def location(self) -> str:
        """Absolute path, or the URL without a password."""
        return without_secret(self._place) if is_url(self._place) else str(Path(self._place).resolve())

    def options(self) -> dict[str, Any]:
        """What decides which documents come out."""
        chosen, files = self._options, self._files
        return {
            "kind": "git",
            "name": self.name,
            "rules": RULES_VERSION,
            "template": TEMPLATE_VERSION,
            "ref": self._ref,
            "parts": sorted(set(chosen.parts)),
            "content": sorted(set(chosen.content)),
            "authors": chosen.authors,
            "author_key": digest_of(["git author key", chosen.author_key])[:16] if chosen.authors == "hash" else None,
            "max_diff_bytes": chosen.max_diff_bytes,
            "since": chosen.since_seconds(),
            "max_commits": chosen.max_commits,
            "group": self._group,
            "include": list(files.include),
            "exclude": list(files.exclude),
            "max_file_bytes": files.max_file_bytes,
            "hidden": files.hidden,
            "vendored": files.vendored,
        }

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        """Runs of commits, oldest first, then runs of files by path."""
        with self._lock:
            opened = self._open()
            history = _History(opened, tips=self._tips(opened), options=self._options)
            # Asked for before the long walk, because it may be a name that nothing bears.
            head = self._head(opened) if "files" in self._options.parts or self._group == "root" else b""
            root = history.root(head) if self._group == "root" else b""
        grouping = _Grouping(self.name, self._group, root)
        if "commits" in self._options.parts:
            yield from self._commit_units(history, grouping, unit_bytes)
        if "files" in self._options.parts:
            yield from self._file_units(opened, head, grouping, unit_bytes)

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        """Renders the commits or reads the blobs of a unit."""
        text = UnitText(documents=[], skips=SkipTally())
        items = [item for item in unit.items if wanted is None or wanted(self._item_key(item))]
        with self._lock:  # one conversation with each git process at a time
            opened = self._open()
            self._read_commits(opened, [item for item in items if isinstance(item, CommitItem)], text)
            self._read_blobs(opened, [item for item in items if isinstance(item, BlobItem)], text)
        return text

    def close(self) -> None:
        """Ends the git processes and removes the clone, in the process that made it."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    @property
    def _group(self) -> str:
        return "path" if self._options.group == "auto" else self._options.group

    def _open(self) -> _Opened:
        """The clone and the processes of this process."""
        if self._opened is None:
            clone = find_clone(self._clone_name)
            if clone is None:
                remove_dead_clones()
                clone = self._made_clone()
            self._opened = _Opened(clone, self._options)
        return self._opened

    def _made_clone(self) -> Clone:
        try:
            return make_clone(self._place, name=self._clone_name, network=self._network)
        except FileExistsError:  # another worker is making it this moment
            return make_clone(self._place, name=new_clone_name(), network=self._network)

    def _tips(self, opened: _Opened) -> list[bytes]:
        """The commits whose history is read."""
        if self._ref is not None:
            return [self._head(opened)]
        tips = {tip for tip, ref in opened.refs() if ref.startswith((b"refs/heads/", b"refs/tags/"))}
        head = opened.resolved("HEAD")
        tips |= {head} if head else set()
        if not tips:
            raise InputError(f"{self.location!r} has no commits", hint="commit something first, or name another path")
        return sorted(tips)

    def _head(self, opened: _Opened) -> bytes:
        """The commit whose files are read."""
        commit = opened.resolved(self._ref if self._ref is not None else "HEAD")
        if commit:
            return commit
        names = [ref.rpartition(b"/")[2].decode("utf-8", "replace") for _, ref in opened.refs()][:10]
        if self._ref is None:
            raise InputError(
                f"HEAD of {self.location!r} points at no commit",
                hint=f"name a ref: git:{self._place}#{names[0] if names else 'main'}; or --git-parts commits",
            )
        known = ", ".join(names) or "none: the repository has no commits"
        raise InputError(f"{self.location!r} has no ref {self._ref!r}", hint=f"refs there: {known}")

    def _commit_units(self, history: _History, grouping: _Grouping, unit_bytes: int) -> Iterator[Unit]:
        builder = _UnitBuilder(self.name)
        for surveyed in history.surveyed(lock=self._lock, with_changes=self._needs_survey):
            group = grouping.of_commit(surveyed)
            builder.add(
                CommitItem(surveyed.commit, surveyed.parent, group, surveyed.problem),
                expected=COMMIT_BYTES + min(surveyed.expected_bytes, self._options.max_diff_bytes),
                bound=COMMIT_BYTES + min(surveyed.most_bytes, self._options.max_diff_bytes),
            )
            if builder.expected >= unit_bytes or builder.bound >= BOUND_FACTOR * unit_bytes:
                yield builder.finish()
                builder = _UnitBuilder(self.name)
        if builder.items:
            yield builder.finish()

    @property
    def _needs_survey(self) -> bool:
        return "diff" in self._content or self._group == "path"

    def _file_units(self, opened: _Opened, commit: bytes, grouping: _Grouping, unit_bytes: int) -> Iterator[Unit]:
        builder = _UnitBuilder(self.name)
        with self._lock:
            entries = opened.tree(commit)
        seen: set[bytes] = set()
        last_path = None
        for path, mode, blob, size in entries:
            key = self._file_key(path)
            reason = "same-path" if path == last_path else self._path_problem(path, mode, size)
            last_path = path
            if reason is None and blob in seen:
                reason = "same-blob"
            if reason is not None:
                builder.skip(reason, key)
                continue
            seen.add(blob)
            assert size is not None
            builder.add(BlobItem(blob, path, size, grouping.of_path(path), commit), expected=size, bound=size)
            if builder.expected >= unit_bytes:
                yield builder.finish()
                builder = _UnitBuilder(self.name)
        if builder.items or builder.skips.counts:
            yield builder.finish()

    def _path_problem(self, path: bytes, mode: bytes, size: int | None) -> str | None:
        """The reason to leave a tree entry out, by the rules of folders and files."""
        folder, _, name = path.rpartition(b"/")
        for step in folder.split(b"/") if folder else ():
            if not self._files.hidden and step.startswith(b"."):
                return "hidden"
            if not self._files.vendored and step in VENDORED_FOLDERS:
                return "vendored"
        if mode in (b"120000", b"160000"):
            return "symlink" if mode == b"120000" else "submodule"
        if not self._files.hidden and name.startswith(b"."):
            return "hidden"
        if problem := self._rules.problem(path):
            return problem
        if size is None:
            return "missing-object"
        return "too-large" if size > self._files.max_file_bytes else None

    def _read_commits(self, opened: _Opened, items: Sequence[CommitItem], text: UnitText) -> None:
        if not items:
            return
        # Newest first: packs hold a file's newest version whole and the older ones as differences from it. Asked the
        # other way round, git works for nearly twice as long.
        items = items[::-1]
        requests = [DiffRequest(item.commit, item.parent) for item in items if not item.problem]
        diffs = opened.diffs.diffs(requests)
        objects = opened.objects.objects([item.commit for item in items])
        for item in items:
            try:
                data = next(objects)
                diff = None if item.problem else next(diffs)
            except GitStoppedError as error:
                raise failed(error, item.commit) from None
            if data is None:
                text.skips.add("missing-object", self._item_key(item))
            else:
                self._add_commit(opened, item, data, diff, text)
        # Ends the conversations: the processes wait for the next questions.
        if next(diffs, None) is not None or next(objects, None) is not None:
            raise RuntimeError("git answered more than it was asked")
        text.documents.reverse()

    def _add_commit(self, opened: _Opened, item: CommitItem, data: bytes, diff: Diff | None, text: UnitText) -> None:
        key = self._item_key(item)
        rendered = render_commit(
            item.commit,
            parse_commit(data),
            diff,
            content=self._content,
            identities=self._identities,
            problem=item.problem,
        )
        if not rendered.text:
            text.skips.add("empty", key)
            return
        facts = {**rendered.facts, **opened.names_of(item.commit)}
        text.documents.append(
            Document(
                key=key,
                group=item.group,
                path=b"commits/" + item.commit,
                byte_start=0,
                byte_end=len(rendered.text),
                parts=(Part(data=rendered.text),),
                language="diff" if diff is not None and "diff" in self._content else "",
                facts=canonical_json(facts).decode(),
                exact=False,
            )
        )

    def _read_blobs(self, opened: _Opened, items: Sequence[BlobItem], text: UnitText) -> None:
        if not items:
            return
        objects = opened.objects.objects([item.blob for item in items])
        for item in items:
            try:
                data = next(objects)
            except GitStoppedError as error:
                raise failed(error, item.at_commit) from None
            key = self._item_key(item)
            reason = "missing-object" if data is None else content_problem(data)
            if reason or data is None:
                text.skips.add(reason or "missing-object", key)
                continue
            facts = {"blob": item.blob.decode(), "commit": item.at_commit.decode()}
            text.documents.append(
                Document(
                    key=key,
                    group=item.group,
                    path=item.path,
                    byte_start=0,
                    byte_end=len(data),
                    parts=(Part(data=data),),
                    language=language_of(item.path),
                    facts=canonical_json(facts).decode(),
                )
            )
        if next(objects, None) is not None:  # ends the conversation
            raise RuntimeError("git answered more than it was asked")

    def _item_key(self, item: CommitItem | BlobItem) -> bytes:
        return self._commit_key(item.commit) if isinstance(item, CommitItem) else self._file_key(item.path)

    def _commit_key(self, commit: bytes) -> bytes:
        return self.name.encode() + b"/commits/" + commit

    def _file_key(self, path: bytes) -> bytes:
        return self.name.encode() + b"/files/" + path


class _Opened:
    """A clone and the git processes on it, of one process."""

    def __init__(self, clone: Clone, options: GitOptions) -> None:
        self.clone = clone
        self.objects = ObjectReader(clone)
        self.sizes = SizeReader(clone)
        self.survey = DiffReader(clone, ask=Ask.PATHS)
        ask = Ask.PATCHES if "diff" in options.content else Ask.LINE_COUNTS
        self.diffs = DiffReader(clone, ask=ask, max_patch_bytes=options.max_diff_bytes)
        self._refs: list[tuple[bytes, bytes]] | None = None
        self._names: dict[bytes, dict[str, list[str]]] | None = None

    def close(self) -> None:
        """Ends the processes, then removes the clone."""
        for conversation in (self.objects, self.sizes, self.survey, self.diffs):
            conversation.close()
        self.clone.close()

    def refs(self) -> list[tuple[bytes, bytes]]:
        """(commit, ref) of every ref, tags followed to what they mark; by name."""
        if self._refs is None:
            lines = self.clone.finished("show-ref", "--dereference").stdout.splitlines()  # fails where there are none
            peeled = {}
            for line in lines:  # an annotated tag comes twice, its commit second
                commit, _, ref = line.partition(b" ")
                peeled[ref.removesuffix(b"^{}")] = commit
            self._refs = [(commit, ref) for ref, commit in sorted(peeled.items())]
        return self._refs

    def names_of(self, commit: bytes) -> dict[str, list[str]]:
        """The tags and branches at a commit, for its facts."""
        if self._names is None:
            self._names = {}
            for tip, ref in self.refs():
                for prefix, kind in ((b"refs/heads/", "branches"), (b"refs/tags/", "tags")):
                    if ref.startswith(prefix):
                        name = ref.removeprefix(prefix).decode("utf-8", "replace")
                        self._names.setdefault(tip, {}).setdefault(kind, []).append(name)
        return self._names.get(commit, {})

    def resolved(self, ref: str) -> bytes | None:
        """The commit that a ref names, or None."""
        found = self.clone.finished("rev-parse", "--verify", "--quiet", "--end-of-options", ref + "^{commit}")
        return found.stdout.strip() if found.returncode == 0 else None

    def shallow(self) -> frozenset[bytes]:
        """The commits whose parents were cut off."""
        file = self.clone.git_folder / "shallow"
        return frozenset(file.read_bytes().split()) if file.exists() else frozenset()

    def tree(self, commit: bytes) -> list[tuple[bytes, bytes, bytes, int | None]]:
        """(path, mode, blob, size) of all files, by path; no size where the blob is missing."""
        listing = self.clone.output("ls-tree", "-r", "-z", "-l", "--full-tree", commit.decode())
        entries = []
        for line in listing.split(b"\0")[:-1]:
            head, _, path = line.partition(b"\t")
            mode, _, blob, size = head.split()
            entries.append((path, mode, blob, int(size) if size.isdigit() else None))
        entries.sort(key=lambda entry: entry[:3])  # git's own order, unless someone forged the tree
        return entries


@dataclass(slots=True)
class _Surveyed:
    """A commit as the first pass sees it."""

    commit: bytes
    parent: bytes | None
    problem: str
    changes: list[Change]
    main_path: bytes = b""
    expected_bytes: int = 0
    most_bytes: int = 0


class _History:
    """The commits to read, oldest first."""

    def __init__(self, opened: _Opened, *, tips: list[bytes], options: GitOptions) -> None:
        self._opened = opened
        self._tips = tips
        self._options = options
        self._shallow = opened.shallow()

    def root(self, head: bytes) -> bytes:
        """Where the line of first parents begins: forks of a project agree on it."""
        found = self._opened.clone.output("rev-list", "--first-parent", "--max-parents=0", head.decode())
        return found.split()[-1]

    def surveyed(self, *, lock: threading.Lock, with_changes: bool) -> Iterator[_Surveyed]:
        """Each commit with its changed paths and the size that its diff may have."""
        commits = self._commits()
        while batch := list(islice(commits, SURVEY_COMMITS)):
            if with_changes:
                with lock:
                    self._survey(batch)
            yield from batch

    def _commits(self) -> Iterator[_Surveyed]:
        limits = ["--topo-order", "--reverse", "--parents"]
        if self._options.max_commits is not None:
            limits.append(f"--max-count={self._options.max_commits}")
        if (since := self._options.since_seconds()) is not None:
            limits.append(f"--since={since}")
        listing = self._opened.clone.output("rev-list", *limits, "--stdin", data=b"\n".join(self._tips) + b"\n")
        for line in io.BytesIO(listing):
            commit, *parents = line.split()
            # Of a commit at the border of a shallow clone everything would look new.
            problem = "shallow-boundary" if commit in self._shallow else ""
            yield _Surveyed(commit, parents[0] if parents else None, problem, [])

    def _survey(self, batch: list[_Surveyed]) -> None:
        self._find_changes([commit for commit in batch if not commit.problem])
        ids = {name for commit in batch for change in commit.changes for name in _blobs(change)}
        ordered = sorted(ids)
        sizes = dict(zip(ordered, self._opened.sizes.sizes(ordered), strict=True))
        for commit in batch:
            _measure(commit, sizes)

    def _find_changes(self, commits: list[_Surveyed]) -> None:
        """Asks for the changes; a commit at which git stops lacks an object, and the rest is asked for again."""
        place = 0
        while place < len(commits):
            requests = [DiffRequest(commit.commit, commit.parent) for commit in commits[place:]]
            try:
                for diff in self._opened.survey.diffs(requests):
                    commits[place].changes = diff.changes
                    place += 1
            except GitStoppedError:
                commits[place].problem = "missing-object"
                place += 1


def _blobs(change: Change) -> list[bytes]:
    """The blobs that a change is between."""
    sides = ((change.old_mode, change.old_id), (change.new_mode, change.new_id))
    return [name for mode, name in sides if mode not in (b"000000", b"160000")]


def _measure(commit: _Surveyed, sizes: dict[bytes, int | None]) -> None:
    """Sets what a commit's diff is expected to take, may take at most, and the path that changed most."""
    most_changed = -1
    for change in commit.changes:
        known = [sizes[name] for name in _blobs(change)]
        if None in known:
            commit.problem = "missing-object"
        whole = [size or 0 for size in known]
        if change.old_id == change.new_id:  # moved, or only its mode changed
            whole = []
        expected = CHANGE_BYTES + (abs(whole[0] - whole[1]) if len(whole) == 2 else sum(whole))
        commit.expected_bytes += expected
        commit.most_bytes += CHANGE_BYTES + sum(whole)
        if expected > most_changed:
            most_changed, commit.main_path = expected, change.path


class _Grouping:
    """Which split group a document is in."""

    def __init__(self, name: str, rule: str, root: bytes) -> None:
        self._prefix = name.encode()
        self._rule = rule
        self._root = root
        self._first_path: dict[bytes, bytes] = {}

    def of_commit(self, commit: _Surveyed) -> bytes:
        """The group of a commit; call it oldest first, because it follows renames."""
        for change in commit.changes if self._rule == "path" else ():
            # The first way in which a path came about counts, so that later commits move nothing.
            old = change.old_path or change.path
            self._first_path.setdefault(change.path, self._first_path.get(old, old))
        if self._rule == "path" and commit.main_path:
            return self.of_path(commit.main_path)
        if self._rule == "root":
            return b"git-root/" + self._root
        return self._prefix + b"/commits/" + commit.commit

    def of_path(self, path: bytes) -> bytes:
        """The group of a file."""
        if self._rule == "root":
            return b"git-root/" + self._root
        return self._prefix + b"/files/" + self._first_path.get(path, path)


class _UnitBuilder:
    """Collects items until a unit is full. Object ids are content, so they tell whether the input changed."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.items: list[CommitItem | BlobItem] = []
        self.skips = SkipTally()
        self.expected = 0
        self.bound = 0
        self._facts: list[bytes] = []

    def add(self, item: CommitItem | BlobItem, *, expected: int, bound: int) -> None:
        """Adds an item."""
        self.items.append(item)
        self.expected += expected
        self.bound += bound
        if isinstance(item, CommitItem):
            self._facts += (item.commit, item.parent or b"", item.group, item.problem.encode())
        else:
            self._facts += (item.blob, item.path, item.group, item.at_commit)

    def skip(self, reason: str, key: bytes) -> None:
        """Counts an entry left out."""
        self.skips.add(reason, key)
        self._facts += (b"left out", reason.encode(), key, b"")

    def finish(self) -> Unit:
        """The finished unit."""
        lengths = repr([len(fact) for fact in self._facts]).encode()
        return Unit(
            source=self._source,
            items=tuple(self.items),
            input_bytes=self.expected,
            skips=self.skips,
            fingerprint=strong_hash(b"\0".join([lengths, *self._facts])).hex(),
            newest_change_ns=0,
        )
