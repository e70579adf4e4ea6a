"""A commit as text, by a fixed template, and as facts.

In: a raw commit object and what it changed. Out: UTF-8 text and a dictionary of facts (docs/git.md shows both). The
text is message, one line per file, diff; each can be left out. It says nothing that depends on the rest of the
repository (no abbreviated ids, no ref names), so that forks give the same document. Costs about 0.1 ms per commit.

`TEMPLATE_VERSION` goes into the store's options: a change of the template is a change of the digest.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.hashing import strong_hash
from penstock.sources.git.objects import Change, Diff
from penstock.sources.hygiene import content_problem

__all__ = ["TEMPLATE_VERSION", "Commit", "Identities", "RenderedCommit", "parse_commit", "render_commit"]

TEMPLATE_VERSION = 1
EPOCH = datetime.datetime(1970, 1, 1)  # UTC, as the Z after it says
MAX_FILE_LINES = 1000
MAX_LISTED_FACTS = 100

LEFT_OUT = {
    "too-large": "too large",
    "not-utf8": "not UTF-8",
    "binary": "binary",
    "shallow-boundary": "its parent isn't in this shallow clone",
    "missing-object": "objects are missing in this partial clone",
}

# Ids are abbreviated as far as they are unique in this repository: they would make forks differ, and teach nothing.
_INDEX_LINE = re.compile(rb"\nindex [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: [0-7]{6})?(?=\n)")
_TRAILER = re.compile(
    r"^[ \t]*(?P<name>[a-z][a-z-]*-by|(?:cc|from|to|author|committer|thanks-to|reply-to)(?=[ \t]*:[^\n]*@))"
    r"[ \t]*:[ \t]*(?P<value>[^\n]*)(?:\n|\Z)",
    re.IGNORECASE | re.MULTILINE,
)
_ISSUE = re.compile(r"(?<![\w&/])#[0-9]{1,9}\b|\bGH-[0-9]{1,9}\b")
_ISSUE_TRAILER = re.compile(
    r"^[ \t]*(?:fixes|closes|resolves|bug|issue|refs?|references|see)[ \t]*:[ \t]*(\S{1,200})",
    re.IGNORECASE | re.MULTILINE,
)
_REVERTED = re.compile(r"\bThis reverts commit ([0-9a-f]{7,64})\b")
_PERSON = re.compile(rb"(.*?) ?<([^<>\n]*)> ?(-?[0-9]{1,18})?(?: [+-][0-9]{4,})?$")
# The names that git repositories carry; others (and codecs that are more than a table) are read as UTF-8.
_CHARSET = re.compile(
    r"(?:iso-?8859-?[0-9]{1,2}|latin-?[0-9]|(?:windows|cp)-?[0-9]{3,4}|koi8-[ru]|euc-?(?:jp|kr|cn)|shift[-_]?jis|sjis"
    r"|gbk|gb2312|gb18030|big5|iso-?2022-(?:jp|kr)|us-ascii|ascii|utf-?8)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Identities:
    """What becomes of people's names and addresses.

    Attributes:
        rule: drop, hash or keep.
        key: of the hash; whoever knows it can test a guess.
    """

    rule: str = "drop"
    key: str = ""

    def pseudonym(self, person: str) -> str:
        """12 hexadecimal digits that stand for an address, or for a name where there is none."""
        address = re.search(r"<([^<>]+)>", person)
        identity = (address[1] if address else person).strip().lower()
        key = strong_hash(b"git identity " + self.key.encode())
        return strong_hash(key + identity.encode("utf-8", "surrogatepass")).hex()[:12]


@dataclass(kw_only=True, slots=True)
class Commit:
    """A parsed commit object; lenient, because histories hold commits that no git of today would write."""

    parents: list[str]
    author: str = ""
    author_email: str = ""
    committer_email: str = ""
    author_time: int | None = None
    time: int | None = None
    message: str = ""
    message_is_exact: bool = True


@dataclass(kw_only=True, slots=True)
class RenderedCommit:
    """A commit as text and facts."""

    text: bytes
    facts: dict[str, Any]


@dataclass(slots=True)
class _Patch:
    """The diff that is shown, and by change the reason for which its part isn't."""

    text: bytes = b""
    left_out: dict[int, str] = field(default_factory=dict)


def parse_commit(data: bytes) -> Commit:
    """Reads a commit object."""
    head, _, message = data.partition(b"\n\n")
    commit = Commit(parents=[])
    charset = "utf-8"
    for line in head.split(b"\n"):
        name, _, value = line.partition(b" ")
        if name == b"parent":
            commit.parents.append(value.decode("ascii", "replace"))
        elif name == b"author":
            commit.author, commit.author_email, commit.author_time = _person(value)
        elif name == b"committer":
            _, commit.committer_email, commit.time = _person(value)
        elif name == b"encoding":
            charset = value.decode("ascii", "replace").strip()
    commit.message, commit.message_is_exact = _decoded(message, charset)
    return commit


def render_commit(
    name: bytes,
    commit: Commit,
    diff: Diff | None,
    *,
    content: frozenset[str],
    identities: Identities,
    problem: str = "",
) -> RenderedCommit:
    """The text and the facts of a commit.

    Args:
        name: its id.
        commit: the parsed object.
        diff: what it changed; None where that can't be known.
        content: which of message, stats and diff are shown.
        identities: what becomes of names.
        problem: why there is no diff.
    """
    message = _message(commit, identities)
    patch = _shown_patch(diff) if diff is not None and "diff" in content else _Patch()
    changes = diff.changes if diff is not None else []
    head = []
    if identities.rule != "drop" and commit.author:
        author = f"{commit.author} <{commit.author_email}>"
        head.append(f"Author: {author if identities.rule == 'keep' else identities.pseudonym(author)}")
    if "message" in content and message:
        head.append(message)
    blocks = ["\n\n".join(head).encode("utf-8", "replace") + b"\n"] if head else []
    lines = _file_lines(changes, patch.left_out, every="stats" in content)
    if problem and content & {"stats", "diff"}:
        lines.append(f"(changes left out: {LEFT_OUT[problem]})")
    if lines:
        blocks.append("\n".join(lines).encode() + b"\n")
    before = b"\n".join(blocks) + (b"\n" if blocks and patch.text else b"")
    facts = _facts(name, commit, changes, message)
    if patch.text:
        facts["diff_start"] = len(before)
    if patch.left_out:
        reasons = list(patch.left_out.values())
        facts["diffs_left_out"] = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    if problem:
        facts["changes_left_out"] = problem
    if identities.rule != "drop" and commit.author:
        facts["author"] = author if identities.rule == "keep" else identities.pseudonym(author)
    return RenderedCommit(text=before + patch.text, facts=facts)


def _person(value: bytes) -> tuple[str, str, int | None]:
    """Name, address and seconds since 1970 of an author or committer line."""
    found = _PERSON.match(value)
    if not found:
        return "", "", None
    name, address, seconds = found.groups()
    return _one_line(name), _one_line(address), int(seconds) if seconds else None


def _one_line(data: bytes) -> str:
    text = data.decode("utf-8", "replace").strip()
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _decoded(message: bytes, charset: str) -> tuple[str, bool]:
    """The message as text, and whether no byte had to be replaced."""
    if not _CHARSET.fullmatch(charset):
        charset = "utf-8"
    try:
        text, exact = message.decode(charset), True
    except (UnicodeDecodeError, LookupError):
        text, exact = message.decode("utf-8", "replace"), False
    if "\0" in text:
        text, exact = text.replace("\0", "\N{REPLACEMENT CHARACTER}"), False
    return text.strip(), exact


def _message(commit: Commit, identities: Identities) -> str:
    """The message with the identities in it treated as the author's is."""
    message = commit.message
    if identities.rule == "keep" or not message:
        return message
    hashed = identities.rule == "hash"

    def trailer(found: re.Match[str]) -> str:
        return f"{found['name']}: {identities.pseudonym(found['value'])}\n" if hashed else ""

    if ":" in message:
        message = _TRAILER.sub(trailer, message)
    for address in {commit.author_email, commit.committer_email}:
        if "@" in address and address in message:
            message = message.replace(address, identities.pseudonym(address) if hashed else "")
    return message.strip()


def _shown_patch(diff: Diff) -> _Patch:
    """The diff without ids, without binary files and without what isn't UTF-8."""
    shown = _Patch()
    texts: list[bytes] = []
    place = 0
    for number, change in enumerate(diff.changes):
        own = diff.patches[place : place + change.num_patches]
        place += change.num_patches
        if problem := _patch_problem(change, own):
            shown.left_out[number] = problem
        else:
            texts += [piece for piece in own if piece is not None]
    shown.text = _INDEX_LINE.sub(b"", b"".join(texts))
    return shown


def _patch_problem(change: Change, pieces: list[bytes | None]) -> str | None:
    if change.insertions is None:
        return "binary"
    for piece in pieces:
        if piece is None:
            return "too-large"
        if problem := content_problem(piece):
            return problem
    return None


def _file_lines(changes: list[Change], left_out: dict[int, str], *, every: bool) -> list[str]:
    """A line per changed file: status, lines added and removed, path; or only of those whose diff isn't shown."""
    chosen = range(len(changes)) if every else sorted(left_out)
    lines = [_file_line(changes[number], left_out.get(number, "")) for number in chosen[:MAX_FILE_LINES]]
    if len(chosen) > MAX_FILE_LINES:
        lines.append(f"({len(chosen) - MAX_FILE_LINES} more files)")
    return lines


def _file_line(change: Change, reason: str) -> str:
    path = quoted_path(change.path)
    if change.old_path:
        path = f"{quoted_path(change.old_path)} => {path}"
    numbers = "binary" if change.insertions is None else f"+{change.insertions} -{change.deletions}"
    note = f" (diff left out: {LEFT_OUT[reason]})" if reason and reason != "binary" else ""
    return f"{change.status.decode()} {numbers} {path}{note}"


_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


def quoted_path(path: bytes) -> str:
    """A path as git writes it in a diff: in quotes and escaped where it holds control characters or isn't UTF-8."""
    try:
        text = path.decode()
    except UnicodeDecodeError:
        text = ""
    if text and text.isprintable() and '"' not in text and "\\" not in text:
        return text
    if text:
        escaped = (_ESCAPES.get(ord(c)) or (c if ord(c) >= 32 and ord(c) != 127 else f"\\{ord(c):03o}") for c in text)
    else:
        escaped = (_ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in path)
    return '"' + "".join(escaped) + '"'


def _facts(name: bytes, commit: Commit, changes: list[Change], message: str) -> dict[str, Any]:
    subject = commit.message.partition("\n")[0]
    reverted = _REVERTED.search(commit.message)
    facts: dict[str, Any] = {
        "commit": name.decode(),
        "time": _iso_time(commit.time),
        "author_time": _iso_time(commit.author_time),
        "parents": commit.parents,
        "files": len(changes),
        "insertions": sum([change.insertions or 0 for change in changes]),
        "deletions": sum([change.deletions or 0 for change in changes]),
        "is_merge": len(commit.parents) > 1,
        "is_revert": bool(reverted) or subject.startswith('Revert "'),
    }
    if reverted:
        facts["reverts"] = reverted[1]
    if issues := _issues(message):
        facts["issues"] = issues
    if renames := [[quoted_path(c.old_path), quoted_path(c.path)] for c in changes if c.old_path]:
        facts["num_renames"] = len(renames)
        facts["renames"] = renames[:MAX_LISTED_FACTS]
    if binary := sum([change.insertions is None for change in changes]):
        facts["binary_files"] = binary
    if not commit.message_is_exact:
        facts["message_has_replacements"] = True
    return facts


def _issues(message: str) -> list[str]:
    """Issues that the message names, as it writes them, in order."""
    found: dict[str, None] = {}
    if "#" in message or "GH-" in message:
        found.update(dict.fromkeys(_ISSUE.findall(message)))
    if ":" in message:
        found.update(dict.fromkeys(value.rstrip(".,;") for value in _ISSUE_TRAILER.findall(message)))
    return list(found)[:MAX_LISTED_FACTS]


def _iso_time(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    try:
        return (EPOCH + datetime.timedelta(seconds=seconds)).isoformat() + "Z"
    except OverflowError:
        return None  # beyond the year 9999: someone's joke
