"""Talking to the two git programs that answer for a whole history: `cat-file --batch` and `diff-tree --stdin`.

In: object ids. Out: objects, and what each commit changed. One process each, however many commits; requests are written
by a thread while answers are read, so neither side waits for the other with a full pipe.

A diff may contain any byte, so nothing in it can mark its end. `diff-tree` echoes a line that is no object id: after
every request we send a word that no repository can know, and read up to it. Memory: a diff beyond the limit is cut into
files as it streams by, and what doesn't fit is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.errors import InputError
from penstock.sources.git.repository import Clone

__all__ = [
    "Change",
    "Diff",
    "DiffReader",
    "DiffRequest",
    "GitStoppedError",
    "ObjectReader",
    "SizeReader",
    "split_patch",
]

READ_BYTES = 2**20
FILE_START = b"diff --git "

DIFF_OPTIONS = ("--stdin", "-r", "--root", "-M", "--no-commit-id", "--no-ext-diff", "--no-textconv", "--raw", "-z")
PATCH_OPTIONS = ("-p", "-U3", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--submodule=short")


class GitStoppedError(Exception):
    """A git process ended while it was being asked: an object is missing or damaged."""


class _Process:
    """A git process and the bytes it has answered so far."""

    def __init__(self, clone: Clone, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile(dir=clone.folder)  # noqa: SIM115 - closed with the process
        try:
            self._process = clone.started(*arguments, errors=self._errors)
        except BaseException:
            self._errors.close()
            raise
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._stdin, self._stdout = stdin, stdout
        with contextlib.suppress(OSError, AttributeError):  # Linux only, and limited per user: merely faster
            fcntl.fcntl(self._stdout.fileno(), fcntl.F_SETPIPE_SZ, READ_BYTES)
        self._writer: threading.Thread | None = None
        self.buffer = bytearray()
        self.position = 0

    def more(self) -> None:
        """Appends what comes next to the buffer."""
        if self.position >= READ_BYTES:
            del self.buffer[: self.position]
            self.position = 0
        piece = os.read(self._stdout.fileno(), READ_BYTES)
        if not piece:
            raise GitStoppedError(self.complaint())
        self.buffer += piece

    def take_until(self, end: bytes) -> bytes:
        """The bytes up to `end`, which is passed over."""
        searched = self.position
        while (found := self.buffer.find(end, searched)) < 0:
            searched = max(self.position, len(self.buffer) - len(end) + 1) - self.position
            self.more()
            searched += self.position
        taken = bytes(self.buffer[self.position : found])
        self.position = found + len(end)
        return taken

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        while len(self.buffer) - self.position < count:
            self.more()
        taken = bytes(self.buffer[self.position : self.position + count])
        self.position += count
        return taken

    @contextlib.contextmanager
    def asked(self, requests: bytes) -> Iterator[None]:
        """Writes requests while the block reads the answers."""
        self._writer = threading.Thread(target=self._write, args=(requests,), name="penstock-git", daemon=True)
        self._writer.start()
        try:
            yield
        except BaseException:
            self.close()  # answers still to come would be taken for those of the next question
            raise
        self._writer.join()

    def complaint(self) -> str:
        """The last line that the process printed on stderr."""
        self._errors.seek(0)
        lines = self._errors.read(2**16).decode("utf-8", "replace").strip().splitlines()
        text = lines[-1] if lines else "it gave no reason"
        return "".join(character if character.isprintable() else "?" for character in text)[:300]

    def close(self) -> None:
        """Ends the process. It only reads, so a kill harms nothing, and waits for nobody who shares its pipes."""
        self._process.kill()
        self._process.wait()
        if self._writer is not None:
            self._writer.join()  # it has met a broken pipe by now
        for file in (self._stdin, self._stdout, self._errors):
            file.close()

    def forget(self) -> None:
        """Drops our ends of the pipes of a process that belongs to the parent of this one."""
        for file in (self._stdin, self._stdout, self._errors):
            file.close()
        self._process.returncode = 0

    def _write(self, requests: bytes) -> None:
        view = memoryview(requests)
        with contextlib.suppress(BrokenPipeError):  # the reader learns it too, and says why
            while view:
                view = view[os.write(self._stdin.fileno(), view[: 2**16]) :]


class _Conversation:
    """A process that is started when it is first asked, again if it stopped, and never shared with a forked child."""

    def __init__(self, clone: Clone, *arguments: str) -> None:
        self._clone = clone
        self._arguments = arguments
        self._process: _Process | None = None
        self._owner = 0

    def process(self) -> _Process:
        """The process, running."""
        if self._process is not None and self._owner != os.getpid():
            self._process.forget()
            self._process = None
        if self._process is None:
            self._process = _Process(self._clone, *self._arguments)
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """Ends the process, if it is ours."""
        if self._process is not None:
            (self._process.close if self._owner == os.getpid() else self._process.forget)()
        self._process = None


class ObjectReader(_Conversation):
    """Objects by id."""

    def __init__(self, clone: Clone) -> None:
        super().__init__(clone, "cat-file", "--batch")

    def objects(self, ids: Sequence[bytes]) -> Iterator[bytes | None]:
        """The content of each object, in order; None where it is missing."""
        process = self.process()
        try:
            with process.asked(b"".join([name + b"\n" for name in ids])):
                for _ in ids:
                    head = process.take_until(b"\n").split(b" ")
                    if len(head) != 3:  # "<id> missing"
                        yield None
                        continue
                    yield process.take(int(head[2]))
                    process.take(1)
        except BaseException:
            self._process = None
            raise


class SizeReader(_Conversation):
    """Sizes of objects by id."""

    def __init__(self, clone: Clone) -> None:
        super().__init__(clone, "cat-file", "--batch-check=%(objectsize)")

    def sizes(self, ids: Sequence[bytes]) -> list[int | None]:
        """The size of each object, in order; None where it is missing."""
        process = self.process()
        try:
            with process.asked(b"".join([name + b"\n" for name in ids])):
                answers = [process.take_until(b"\n") for _ in ids]
        except BaseException:
            self._process = None
            raise
        return [int(answer) if answer.isdigit() else None for answer in answers]


@dataclass(slots=True)
class Change:
    """What a commit did to one path.

    Attributes:
        status: A, D, M, T (type) or R (rename), as git names them.
        path: the path after the commit (before it, of a deletion).
        old_path: the path before a rename, else empty.
        old_mode, new_mode: `100644`, `120000` (symbolic link), `160000` (submodule)…
        old_id, new_id: blobs, all zeros where there is none.
        insertions, deletions: lines; None of a binary file.
    """

    status: bytes
    path: bytes
    old_path: bytes
    old_mode: bytes
    new_mode: bytes
    old_id: bytes
    new_id: bytes
    insertions: int | None = 0
    deletions: int | None = 0

    @property
    def num_patches(self) -> int:
        """How many entries of the diff stand for it: a file that became a link is deleted, then created."""
        return 2 if self.old_mode[:2] != self.new_mode[:2] and self.status == b"T" else 1


@dataclass(slots=True)
class Diff:
    """What a commit changed.

    Attributes:
        changes: one per path, in git's order.
        patches: the diff by entry, None where one was too large; empty where none was asked for.
    """

    changes: list[Change]
    patches: list[bytes | None]


@dataclass(frozen=True, slots=True)
class DiffRequest:
    """A commit and the parent to compare it with; None: with the empty tree."""

    commit: bytes
    parent: bytes | None


class Ask(Enum):
    """What `DiffReader` finds out."""

    PATHS = ()
    LINE_COUNTS = ("--numstat",)
    PATCHES = PATCH_OPTIONS


class DiffReader(_Conversation):
    """What commits changed.

    Lines are counted in the diff where there is one: with `--numstat` beside it git would make every diff twice.

    Args:
        clone: the repository.
        ask: only paths, or lines added and removed too, or the diff as well.
        max_patch_bytes: of a commit's diff, the files that don't fit into this are left out.
    """

    def __init__(self, clone: Clone, *, ask: Ask, max_patch_bytes: int = 0) -> None:
        super().__init__(clone, "diff-tree", *DIFF_OPTIONS, *ask.value)
        self._ask = ask
        self._limit = max_patch_bytes

    def diffs(self, requests: Sequence[DiffRequest]) -> Iterator[Diff]:
        """The changes of each commit, in order.

        Raises:
            GitStoppedError: an object that the next one needs is missing or damaged.
        """
        process = self.process()
        # Not hexadecimal, so it is echoed.
        mark = b"penstock-%s\n" % secrets.token_hex(16).encode()
        lines = [
            b"%s %s\n%s" % (request.commit, request.parent, mark) if request.parent else request.commit + b"\n" + mark
            for request in requests
        ]
        try:
            with process.asked(b"".join(lines)):
                for _ in requests:
                    yield self._diff(process, mark)
        except BaseException:
            self._process = None
            raise

    def _diff(self, process: _Process, mark: bytes) -> Diff:
        # Nearly always the whole answer is there at once, or after another read.
        while (end := process.buffer.find(mark, process.position)) < 0:
            if self._ask is Ask.PATCHES and len(process.buffer) - process.position > self._limit + READ_BYTES:
                return self._large_diff(process, mark)
            process.more()
        answer = bytes(process.buffer[process.position : end])
        process.position = end + len(mark)
        head, _, patch = answer.partition(b"\0\0")
        changes = parse_changes(head, line_counts=self._ask is Ask.LINE_COUNTS)
        if not patch:
            return Diff(changes, [])
        pieces = split_patch(patch)
        _set_counts(changes, [_counts(piece) for piece in pieces])
        return Diff(changes, [*pieces] if len(patch) <= self._limit else _fitting(pieces, self._limit))

    def _large_diff(self, process: _Process, mark: bytes) -> Diff:
        """As `_diff`, without holding more than the limit and one read."""
        changes = parse_changes(process.take_until(b"\0\0"), line_counts=False)
        border = re.compile(b"\n(?:" + FILE_START + b"|" + re.escape(mark) + b")")
        patches: list[bytes | None] = []
        counts: list[_Counts] = []
        left, is_last, prefix = self._limit, False, b""
        while not is_last:
            piece, count, is_last = _next_piece(process, border, prefix, keep=left)
            patches.append(piece)
            counts.append(count)
            left -= len(piece) if piece is not None else 0
            prefix = FILE_START
        _set_counts(changes, counts)
        return Diff(changes, patches)


@dataclass(slots=True)
class _Counts:
    """What one entry of a diff amounts to."""

    insertions: int = 0
    deletions: int = 0
    has_hunks: bool = False
    is_binary: bool = False

    def add(self, text: bytes) -> None:
        """Counts a stretch that ends before a newline, or at the entry's end."""
        self.insertions += text.count(b"\n+")
        self.deletions += text.count(b"\n-")
        self.has_hunks = self.has_hunks or b"\n@@ " in text
        self.is_binary = self.is_binary or (not self.has_hunks and b"\nBinary files " in text)

    def finished(self) -> _Counts:
        """Without the two lines that name the file."""
        self.insertions -= self.has_hunks
        self.deletions -= self.has_hunks
        return self


def _counts(piece: bytes) -> _Counts:
    counts = _Counts()
    counts.add(piece)
    return counts.finished()


def _next_piece(
    process: _Process, border: re.Pattern[bytes], prefix: bytes, *, keep: int
) -> tuple[bytes | None, _Counts, bool]:
    """One entry of a streaming diff (None if it is larger than `keep`), its counts, and whether it is the last."""
    kept, counts, size = [prefix], _Counts(), len(prefix)
    while True:
        found = border.search(process.buffer, process.position)
        # All that we look for begins with a newline, so what lies before the last one can be judged and go.
        end = found.start() if found else process.buffer.rfind(b"\n", process.position)
        end = end if end >= 0 else len(process.buffer)
        text = bytes(process.buffer[process.position : end])
        counts.add(text)
        size += len(text)
        if size < keep:
            kept.append(text)
        process.position = end
        if found:
            process.position = found.end()
            is_last = not found.group().endswith(FILE_START)
            return (b"".join([*kept, b"\n"]) if size < keep else None), counts.finished(), is_last
        process.more()


def _set_counts(changes: list[Change], counts: list[_Counts]) -> None:
    """Gives each change the lines counted in its entries of the diff."""
    place = 0
    for change in changes:
        own = counts[place : place + change.num_patches]
        place += change.num_patches
        is_binary = any(count.is_binary for count in own)
        change.insertions = None if is_binary else sum([count.insertions for count in own])
        change.deletions = None if is_binary else sum([count.deletions for count in own])


def split_patch(patch: bytes) -> list[bytes]:
    """A diff by entry; exact, because every line of content begins with a space, a sign or a backslash."""
    first, *others = patch.split(b"\n" + FILE_START)
    if not others:
        return [patch]
    return [first + b"\n", *[FILE_START + piece + b"\n" for piece in others[:-1]], FILE_START + others[-1]]


def _fitting(patches: Iterable[bytes], limit: int) -> list[bytes | None]:
    """Each entry of a diff, or None where it is larger than what those before it left of the limit."""
    fitting: list[bytes | None] = []
    for patch in patches:
        fits = len(patch) <= limit
        fitting.append(patch if fits else None)
        limit -= len(patch) if fits else 0
    return fitting


def parse_changes(head: bytes, *, line_counts: bool) -> list[Change]:
    """`--raw -z` and after it, if asked for, `--numstat -z`."""
    fields = head.split(b"\0")
    place, count = 0, len(fields)
    changes: list[Change] = []
    while place < count and fields[place].startswith(b":"):
        old_mode, new_mode, old_id, new_id, status = fields[place][1:].split(b" ")
        renamed = status[:1] in b"RC"
        old_path = fields[place + 1] if renamed else b""
        place += 3 if renamed else 2
        changes.append(Change(status[:1], fields[place - 1], old_path, old_mode, new_mode, old_id, new_id))
    for change in changes if line_counts else ():
        insertions, deletions, path = fields[place].split(b"\t", 2)
        place += 1 if path else 3
        change.insertions = None if insertions == b"-" else int(insertions)
        change.deletions = None if deletions == b"-" else int(deletions)
    return changes


def failed(error: GitStoppedError, commit: bytes) -> InputError:
    """The error for a user whose repository has damaged objects."""
    return InputError(
        f"git stopped at commit {commit.decode()}: {error}",
        hint="check the repository with `git fsck`, or clone it anew",
    )
