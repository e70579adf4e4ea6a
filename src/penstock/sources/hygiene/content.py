"""What a document's bytes tell about it: whether it is text, minified, generated, and under which licence.

Each rule reads as little as it can. Whether it is text takes one pass at memory speed. Minified code shows in a few
probes for a newline; only where one fails are the lines counted. Generated code and a licence say so in the first
2 KiB, which one native search for a few words looks through.

`CONTENT_RULES_VERSION` goes into the store's options: a change of rules is a change of the digest.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = [
    "CONTENT_RULES_VERSION",
    "Head",
    "content_problem",
    "head_of",
    "is_generated_name",
    "is_minified",
]

CONTENT_RULES_VERSION = 1

MIN_MINIFIED_BYTES = 1024
PROBE_BYTES = 256
NEWLINE = 10
MINIFIED_MEAN_LINE_BYTES = 200
MINIFIED_LONG_LINE_BYTES = 1000
MINIFIED_LONG_SHARE = 0.5
MINIFIED_WHITESPACE_SHARE = 0.10

HEAD_BYTES = 2048
DECODED_BYTES = 2**14


def content_problem(data: bytes) -> str | None:
    """The reason for which this content isn't text, or None. Costs one pass at memory speed for ASCII."""
    if not data:
        return "empty"
    if b"\0" in data:
        return "binary"
    return None if data.isascii() or _is_utf8(data) else "not-utf8"


def _is_utf8(data: bytes) -> bool:
    """In pieces that stay in the processor's cache: a file decoded as a whole takes up to four times its size."""
    start = 0
    try:
        while start < len(data):
            piece = data[start : start + DECODED_BYTES]
            is_last = start + len(piece) == len(data)
            start += len(piece) if piece.isascii() else codecs.utf_8_decode(piece, "strict", is_last)[1]
    except UnicodeDecodeError:
        return False
    return True


_MINIFIED_ENDINGS = (b".min.js", b".min.mjs", b".min.cjs", b".min.css", b"-min.js", b"-min.css")
_WHITESPACE = b" \t\r\n"


def is_minified(name: bytes, data: bytes) -> bool:
    """Whether code was squeezed by a program, by the file's name (in lower case) or its lines.

    By its lines: they are longer than 200 bytes on average, or half of the bytes lie in lines longer than 1,000; and
    less than a tenth is white space, which tells code from prose. Looked at closely only where one of three probes of
    256 bytes (a quarter in, half way, at the end) meets no newline: counting all newlines would cost 1 ns per byte.
    """
    if name.endswith(_MINIFIED_ENDINGS):
        return True
    size = len(data)
    if size < MIN_MINIFIED_BYTES:
        return False
    for start in (size >> 2, size >> 1, size - PROBE_BYTES):
        if data.find(b"\n", start, start + PROBE_BYTES) < 0:
            return _has_minified_lines(data)
    return False


def _has_minified_lines(data: bytes) -> bool:
    # The cheapest first: nearly all that comes here is data in code, of which a few lines are long, but not that long.
    is_long = len(data) > MINIFIED_MEAN_LINE_BYTES * (data.count(b"\n") + 1)
    if not is_long and not _may_have_line_of(MINIFIED_LONG_LINE_BYTES, data):
        return False
    if len(data) - len(data.translate(None, _WHITESPACE)) >= MINIFIED_WHITESPACE_SHARE * len(data):
        return False
    return is_long or _bytes_in_long_lines(data) > MINIFIED_LONG_SHARE * len(data)


def _may_have_line_of(size: int, data: bytes) -> bool:
    """False where no line is that long: such a one covers a whole stretch of half its size, wherever it begins."""
    half = size // 2
    starts = range(0, len(data), half)
    return any(data.find(b"\n", start, start + half) < 0 for start in starts)


def _bytes_in_long_lines(data: bytes) -> int:
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)
    lengths = np.diff(newlines, prepend=-1, append=len(data)) - 1
    return int(lengths[lengths > MINIFIED_LONG_LINE_BYTES].sum())


_LOCK_FILES = frozenset(
    b"package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml bun.lock deno.lock composer.lock".split()
    + b"cargo.lock poetry.lock pdm.lock uv.lock pipfile.lock go.sum go.work.sum gopkg.lock glide.lock".split()
    + b"gemfile.lock flake.lock mix.lock pubspec.lock podfile.lock package.resolved gradle.lockfile".split()
    + b".terraform.lock.hcl conda-lock.yml packages.lock.json".split()
)
_GENERATED_ENDINGS = (
    b"_pb2.py", b"_pb2.pyi", b"_pb2_grpc.py", b".pb.go", b".pb.cc", b".pb.h", b"_pb.js", b"_pb.d.ts", b".g.dart",
    b".freezed.dart", b".designer.cs", b".g.cs", b".feature.cs", b".js.map", b".css.map", b".mjs.map",
)  # fmt: skip


_LAST_BYTES = 4
_GENERATED_LAST_BYTES = frozenset(ending[-_LAST_BYTES:] for ending in _GENERATED_ENDINGS)


def is_generated_name(name: bytes) -> bool:
    """Whether the name of a file (in lower case, without folders) is one that only programs give."""
    # The last bytes first: to compare a name with every ending costs as much as all that is asked of its beginning.
    return name in _LOCK_FILES or (name[-_LAST_BYTES:] in _GENERATED_LAST_BYTES and name.endswith(_GENERATED_ENDINGS))


# At the start of a comment or docstring line, so that a generator that holds these words in a string isn't taken for
# its own output, nor a table "generated by running this" for a generated file.
_GENERATED = re.compile(
    rb"""
    [ \t]*(?:[#%;/*!<'"-]+|dnl\b|rem\b)?[ \t\#*=/!-]*(?:(?:note|warning|attention|caution)\W{1,4})?
    (?: @(?:partially-)?generated\b
      | code[ ]generated\b[^\n]{0,200}\bdo[ ]not[ ](?:edit|modify)
      | generated[ ]code\b\W{1,8}do[ ]not[ ](?:edit|modify)
      | (?:this|the)[ ](?:file|code|module|header|source|script|class|document)(?:[ ]file)?[ ](?:is|was|has[ ]been)[ ]
        (?:(?:an?[ ])?(?:automatically|auto|machine|programmatically)[ -]?generated
          |generated[ ](?:by|from|with|using|automatically|at)\b)
      | this[ ]is[ ]an?[ ](?:automatically|auto|machine)[ -]?generated[ ](?:file|code|source|header)\b
      | (?:automatically|auto|machine)[ -]?generated
        (?:[ ](?:by|from|with|using)\b|[ ]?[.,;:!(-]|[ ]*$|[ ]+(?:file|code|source|header)?[.,;:!( -]*do[ ]not)
      | generated[ ](?:by|from|with|using|automatically|file)\b[^\n]{0,160}do[ ]not[ ](?:edit|modify)
      | (?:auto)?generated[ ]by[ ](?:the[ ]protocol[ ]buffer|the[ ]grpc|cython|thrift|peg\.js|peggy|coffeescript|swig
          |antlr|jison|racc|ragel|re2c|openapi|swagger|flatc|sip\b|pyuic|pyrcc|f2py|lalrpop|nanopb|wsdl)
      | a[ ]bison[ ]parser,[ ]made[ ]by | a[ ]lexical[ ]scanner[ ]generated[ ]by[ ]flex
      | do[ ]not[ ](?:edit|modify)\b[^\n]{0,100}\bgenerated\b
      | (?:autogenerated|auto-generated)[ ]by[ ]
    )""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_LICENCE = re.compile(rb"SPDX-License-Identifier:[ \t]*([A-Za-z0-9(][A-Za-z0-9.+() -]{0,99})")
_HEAD_WORDS = (
    b"SPDX-License-Identifier:", b"generated", b"Generated", b"GENERATED", b"made by GNU Bison", b"do not edit",
    b"Do not edit", b"DO NOT EDIT",
)  # fmt: skip
_LICENCE_WORD = 0


class Head(NamedTuple):
    """What the first 2 KiB of a file say about it.

    Attributes:
        licence: the SPDX expression, or the empty string.
        is_generated: whether they say that a program wrote it.
    """

    licence: str = ""
    is_generated: bool = False


_NOTHING_SAID = Head()


@functools.cache
def _head_search() -> Callable[[bytes], list[tuple[int, int, int]]]:
    from ahocorasick_rs import BytesAhoCorasick, MatchKind

    return BytesAhoCorasick(_HEAD_WORDS, matchkind=MatchKind.LeftmostFirst).find_matches_as_indexes


def head_of(data: bytes) -> Head:
    """Reads the beginning of a file. Where it holds none of the words that matter that takes about 1 µs."""
    head = data[:HEAD_BYTES]
    found = _head_search()(head)
    if not found:
        return _NOTHING_SAID
    licence, is_generated = "", False
    for word, start, _ in found:
        if word != _LICENCE_WORD:
            # Every phrase fits on the line of its word.
            is_generated = is_generated or _GENERATED.match(head, head.rfind(b"\n", 0, start) + 1) is not None
        elif not licence and (identifier := _LICENCE.match(head, start)):
            licence = _expression(identifier[1])
    return Head(licence, is_generated)


@functools.lru_cache
def _expression(found: bytes) -> str:
    """An SPDX expression without what ends a comment after it."""
    text = found.decode("ascii").rstrip(" -")
    while text.endswith(")") and text.count(")") > text.count("("):
        text = text[:-1].rstrip()
    return text
