"""Finds secrets by their published shapes and puts a marker in their place.

In: a document's bytes. Out: the same object, or a copy in which each secret is `[redacted <kind>]`.

Two native searches (Teddy, in Rust's aho-corasick) look for the literals of secret_rules.py, at 3 GB/s each on one
core. Such a search takes at most 64 literals of at least 4 bytes; beyond that it falls back to an automaton a tenth as
fast. Only where a literal is met do the rules look, with expressions of bounded length: time is linear in the size, for
hostile input too. Memory: the hits of one stretch of 1 MiB, and a copy of a document that holds a secret.

Where the C extension was built, its one search for all literals takes the place of these two (see `marks`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.native import native
from penstock.sources.hygiene.secret_rules import (
    FORMATS,
    MAX_USER_BYTES,
    NAMES,
    SECRET_RULES_VERSION,
    Finder,
    Span,
    url_password,
)

__all__ = [
    "SECRET_RULES_VERSION",
    "literal_search",
    "literals_of",
    "redacted",
    "secret_spans",
    "secret_spans_in_python",
]

Hit = tuple[int, int, int]
"""Number of a literal, start, end."""
Search = Callable[[bytes], list[Hit]]

STRETCH_BYTES = 2**20
BUCKETS = 16
OVERLAP_BYTES = 32
"""As long as the longest literal at least: none is lost on the border of two stretches."""
_LIST_START_PLACE = operator.itemgetter(0, 2, 1)


def redacted(data: bytes, found: dict[str, int]) -> bytes:
    """The data with markers in the place of secrets, which are counted in `found` by kind."""
    # Again after each change: what stands beside a secret may be one as well, once the marker ends it. Markers match
    # no rule and each round takes bytes away that are in none, so this ends; nearly always in the second round.
    while spans := secret_spans(data):
        pieces: list[bytes] = []
        done = 0
        for start, end, kind in spans:
            found[kind] = found.get(kind, 0) + 1
            pieces += (data[done:start], b"[redacted ", kind.encode(), b"]")
            done = end
        data = b"".join([*pieces, data[done:]])
    return data


def secret_spans(data: bytes) -> list[Span]:
    """Where the secrets are: start, end, kind; in order, without overlap."""
    search = literal_search()
    if search is None or len(data) > STRETCH_BYTES:
        return secret_spans_in_python(data)
    rules = _numbered_rules()
    spans: list[Span] = []
    # In the order of the two searches: each list on its own, and of literals at one place the first.
    met = [(*rules[number][:2], start, end, rules[number][3]) for start, number, end in native.hits(search, data)]  # type: ignore[union-attr]
    met.sort(key=_LIST_START_PLACE)
    for rule_list in (0, 1):
        literal_end, done = 0, 0
        for in_list, _, start, end, finder in met:
            if in_list != rule_list or start < literal_end:
                continue
            literal_end = end
            if start >= done and (span := finder(data, start, end)):
                spans.append(span)
                done = span[1]
    return _without_overlap(spans) if spans else spans


def secret_spans_in_python(data: bytes) -> list[Span]:
    """The same without the extension."""
    spans: list[Span] = []
    for search, finders in _searches():
        if len(data) > STRETCH_BYTES:
            _look_in_stretches(data, search, finders, spans)
        elif hits := search(data):
            _look(data, 0, hits, finders, spans, 0)
    return _without_overlap(spans) if spans else spans


def _look(data: bytes, base: int, hits: list[Hit], finders: Sequence[Finder], spans: list[Span], done: int) -> int:
    """Asks the finders; returns where the last secret ends."""
    for literal, start, end in hits:
        # Not inside the last one: a long secret may hold many literals.
        if base + start >= done and (span := finders[literal](data, base + start, base + end)):
            spans.append(span)
            done = span[1]
    return done


def _look_in_stretches(data: bytes, search: Search, finders: Sequence[Finder], spans: list[Span]) -> None:
    """As for a short document, with the hits of one stretch at a time in memory."""
    done = 0
    for base in range(0, len(data), STRETCH_BYTES):
        hits = search(data[base : base + STRETCH_BYTES + OVERLAP_BYTES])
        done = _look(data, base, hits, finders, spans, done)


def _without_overlap(spans: list[Span]) -> list[Span]:
    """Of spans that overlap the first found stays: formats come before names."""
    if len(spans) == 1:
        return spans
    order = sorted(range(len(spans)), key=lambda number: (spans[number][0], number))
    kept: list[Span] = []
    for number in order:
        start, end, kind = spans[number]
        if kept and start < kept[-1][1]:
            continue
        kept.append((start, end, kind))
    return kept


@functools.cache
def _searches() -> tuple[tuple[Search, tuple[Finder, ...]], ...]:
    """Per process: the searches and, by the number of a literal, who looks where it was met."""
    from ahocorasick_rs import BytesAhoCorasick, MatchKind

    searches = []
    for rules in (FORMATS, NAMES):
        ordered = _in_buckets(rules)
        # Leftmost-first is the kind for which the library has its vectorised search.
        searcher = BytesAhoCorasick([literal for literal, _ in ordered], matchkind=MatchKind.LeftmostFirst)
        searches.append((searcher.find_matches_as_indexes, tuple(finder for _, finder in ordered)))
    return tuple(searches)


def _in_buckets(rules: Sequence[tuple[bytes, Finder]]) -> list[tuple[bytes, Finder]]:
    """The rules in an order in which every 16th literal is alike.

    Teddy puts them into 16 buckets in turn and first asks for each byte whether it could be one of a bucket, by halves
    of bytes: the more alike a bucket's literals, the fewer false starts. Measured: 1.2 GB/s as written, 3 so ordered.
    """
    alike = iter(sorted(rules, key=lambda rule: ([byte & 15 for byte in rule[0][:4]], rule[0])))
    ordered = list(rules)
    for bucket in range(BUCKETS):
        for place in range(bucket, len(rules), BUCKETS):
            ordered[place] = next(alike)
    return ordered


WINDOW_BYTES = 4
MOST_AT_A_TIME = 64
# The bytes of code, the most frequent first; the others are rarer still.
_FREQUENT = b" etarniosl\ndcpfmu_g\"'.,()h=-b:v#y*1w0x/k2TSEACINR3OL[]D4P56M8F97B{}zqj"
_FREQUENCY = [1 / (2 + (_FREQUENT.find(byte) if byte in _FREQUENT else 200)) for byte in range(256)]


@functools.cache
def literal_search() -> Any:
    """The extension's search for every literal, by its number in `_numbered_rules`; None where it has no fast one.

    An address counts only if there is an @ behind it, without which no rule takes it. That it isn't told of otherwise
    uncovers nothing: no literal begins within one that introduces an address.
    """
    if native is None:
        return None
    rules = _numbered_rules()
    needs = {literal: MAX_USER_BYTES for _, _, literal, finder in rules if finder is url_password}
    return literals_of(
        [literal for _, _, literal, _ in rules], {literal: (size, b"@") for literal, size in needs.items()}
    )


def literals_of(
    literals: Sequence[bytes], needs: Mapping[bytes, tuple[int, bytes]], *, most: int = MOST_AT_A_TIME
) -> Any:
    """A search of the extension for literals, which it numbers as they come; None where it has no fast one.

    Of each literal it looks for the four bytes that code holds least often. As Teddy it does so in 16 buckets, whose
    windows are the more alike for being neighbours in order.

    Args:
        literals: of 4 to 32 bytes.
        needs: of some, what must stand within so many bytes behind it for it to count.
        most: places that are looked at in one step, if the processor has instructions for so many.
    """
    starts = [_rarest(literal) for literal in literals]
    windows = [literal[start : start + WINDOW_BYTES] for literal, start in zip(literals, starts, strict=True)]
    order = sorted(range(len(literals)), key=windows.__getitem__)
    buckets = {number: place * BUCKETS // len(order) for place, number in enumerate(order)}
    return native.literals(  # type: ignore[union-attr]
        [
            (literal, starts[number], buckets[number], size, ord(needed))
            for number, literal in enumerate(literals)
            for size, needed in [needs.get(literal, (0, b"\0"))]
        ],
        most,
    )


def _rarest(literal: bytes) -> int:
    """Where in a literal its rarest window begins."""
    starts = range(len(literal) - WINDOW_BYTES + 1)
    return min(starts, key=lambda at: math.prod(_FREQUENCY[byte] for byte in literal[at : at + WINDOW_BYTES]))


@functools.cache
def _numbered_rules() -> tuple[tuple[int, int, bytes, Finder], ...]:
    """Which list, place in it, literal, finder."""
    return tuple(
        (number, place, literal, finder)
        for number, rules in enumerate((FORMATS, NAMES))
        for place, (literal, finder) in enumerate(_in_buckets(rules))
    )
