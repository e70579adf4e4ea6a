"""Finds the documents that contain a passage.

In: a store and some text. Out: how often each document holds it, and of the first few documents the places: bytes of
the file, line, tokens. What is searched is the text that the tokens stand for, not the ids: the same words get other
ids in other surroundings. A match never spans two documents; overlapping ones all count.

How: one pass over the tokens in stretches, each checked on first touch. A passage can only be where some token covers
its i-th byte, and few tokens of a vocabulary do; i is the byte whose tokens are rarest in the first stretch. Only the
surroundings of those tokens become text (a `take` from a table of the tokens' bytes), which is then searched. Where
such tokens are everywhere, all of it becomes text. Memory: a few times STRETCH_BYTES, and 8 bytes per document.

A vocabulary that isn't byte-level has no bytes per token: its documents are decoded one by one, many times slower, and
what is found is the document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DamagedStoreError
from penstock.store.layout import REASONS
from penstock.store.provenance import DocumentOrigin, document_origin
from penstock.store.reader import Store
from penstock.tokenize import Tokenizer

__all__ = ["Found", "FoundDocument", "Place", "find_passage"]

Integers = npt.NDArray[np.int64]

STRETCH_TOKENS = 2**21
STRETCH_BYTES = 16 * 2**20
DECODED_AT_ONCE_TOKENS = 2**18
MOST_PLACES = 5
CONTEXT_BYTES = 60
POSITIONS_WEIGHED = 24
# Beyond this share of a stretch, picking the surroundings out costs more than turning all of it into text.
MOST_PICKED = 0.25


@dataclass(frozen=True, kw_only=True)
class Place:
    """One occurrence of the passage in a document.

    Attributes:
        byte_start: in the document's file; of the whole document where not `exact`.
        line: in the document's text, from 1.
        first_token: number in the document of the token that holds the passage's first byte.
        token: the same, numbered over the kept documents (of the split asked for); None in an excluded document.
        context: the line around it.
    """

    byte_start: int
    byte_end: int
    exact: bool
    line: int
    first_token: int
    last_token: int
    token: int | None
    context: str


@dataclass(frozen=True, kw_only=True)
class FoundDocument:
    """A document that holds the passage: how often, and where first."""

    document: int
    key: str
    source: str
    file: str
    split: str
    status: str
    tokens: int
    facts: dict[str, Any]
    matches: int
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to: `found` documents, of which some are `shown`.

    Attributes:
        splits: of the kept documents among them, by split: documents and matches.
        excluded: documents among them that aren't in the data, by reason.
        exact: whether places are exact to the token.
    """

    passage: str
    split: str | None
    ignore_case: bool
    exact: bool
    searched: int
    found: int
    matches: int
    splits: dict[str, dict[str, int]]
    excluded: dict[str, int]
    shown: tuple[FoundDocument, ...] = field(default=())


def find_passage(
    store: Store,
    passage: str,
    *,
    split: str | None = None,
    most: int = 20,
    ignore_case: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Found:
    """The documents that contain a passage, excluded ones too, in canonical order.

    Args:
        store: where.
        passage: what; its bytes are compared as they are.
        split: only documents of this split.
        most: how many documents to show in full; all are counted.
        ignore_case: take ASCII letters of either case for each other.
        on_progress: told how many tokens were searched, of how many.

    Raises:
        ConfigError: the passage is empty.
        StoreError: there is no such split, or the store is damaged.
    """
    wanted = passage.encode("utf-8", "surrogateescape")
    if not wanted:
        raise ConfigError("there is nothing to find: the passage is empty", hint="give some text: --find 'some text'")
    chosen = np.ones(store.num_documents, np.bool_)
    if split is not None:
        chosen = store.arrays["split"] == store.split_number(split)
    tokenizer = store.tokenizer()
    kind = _BytesOfTokens if tokenizer.spec.is_byte_level else _DecodedText
    searcher = kind(store, tokenizer, wanted.lower() if ignore_case else wanted, ignore_case=ignore_case)
    documents = np.flatnonzero(chosen)
    counts = searcher.counts(documents, on_progress or (lambda done, total: None))
    holding = np.flatnonzero(counts)
    numbers = _TokenNumbers(store, split)
    return Found(
        passage=passage,
        split=split,
        ignore_case=ignore_case,
        exact=kind is _BytesOfTokens,
        searched=len(documents),
        found=len(holding),
        matches=int(counts.sum()),
        **_tallies(store, holding, counts),
        shown=tuple(
            _found_document(store, int(number), int(counts[number]), searcher, numbers) for number in holding[:most]
        ),
    )


def _tallies(store: Store, holding: Integers, counts: Integers) -> dict[str, Any]:
    reasons, splits = store.arrays["reason"][holding], store.arrays["split"][holding]
    kept = reasons == REASONS.index("kept")
    found_in = {
        name: {
            "documents": int(np.count_nonzero(kept & (splits == number))),
            "matches": int(counts[holding[kept & (splits == number)]].sum()),
        }
        for number, name in enumerate(store.manifest.splits)
    }
    excluded = {
        name: int(np.count_nonzero(reasons == number))
        for number, name in enumerate(REASONS)
        if name != "kept" and (reasons == number).any()
    }
    return {"splits": found_in, "excluded": excluded}


class _TokenNumbers:
    """Where each kept document begins in the numbering that `token_origin` takes."""

    def __init__(self, store: Store, split: str | None) -> None:
        self._documents = store.kept_documents(split)
        lengths = store.arrays["length"][self._documents].astype(np.int64)
        self._starts = np.cumsum(lengths) - lengths

    def first(self, document: int) -> int | None:
        place = int(np.searchsorted(self._documents, document))
        is_kept = place < len(self._documents) and int(self._documents[place]) == document
        return int(self._starts[place]) if is_kept else None


def _found_document(
    store: Store, document: int, matches: int, searcher: _Searcher, numbers: _TokenNumbers
) -> FoundDocument:
    origin = document_origin(store, document)
    text, spans = searcher.text_and_spans(document, MOST_PLACES)
    places = tuple(_place(origin, text, span, numbers.first(document)) for span in spans)
    names = ("document", "key", "source", "file", "split", "status", "tokens", "facts")
    return FoundDocument(**{name: getattr(origin, name) for name in names}, matches=matches, places=places)


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A match in a document: bytes of its text, and tokens, the whole document's where they aren't known."""

    start: int
    end: int
    first_token: int
    last_token: int


def _place(origin: DocumentOrigin, text: bytes, span: _Span, first: int | None) -> Place:
    is_exact = origin.exact and len(text) == origin.byte_end - origin.byte_start
    line_start, line_end = text.rfind(b"\n", 0, span.start) + 1, text.find(b"\n", span.end)
    around = text[
        max(line_start, span.start - CONTEXT_BYTES) : min(
            len(text) if line_end < 0 else line_end, span.end + CONTEXT_BYTES
        )
    ]
    return Place(
        byte_start=origin.byte_start + (span.start if is_exact else 0),
        byte_end=origin.byte_start + span.end if is_exact else origin.byte_end,
        exact=is_exact,
        line=1 + text.count(b"\n", 0, span.start),
        first_token=span.first_token,
        last_token=span.last_token,
        token=None if first is None else first + span.first_token,
        # A cut may fall inside a character.
        context=around.decode("utf-8", "replace").strip("\N{REPLACEMENT CHARACTER}"),
    )


class _Searcher(Protocol):
    """A way to search; which one depends on the vocabulary."""

    def __init__(self, store: Store, tokenizer: Tokenizer, passage: bytes, *, ignore_case: bool) -> None: ...

    def counts(self, documents: Integers, on_progress: Callable[[int, int], None]) -> Integers:
        """Matches of every document of the store; 0 where it wasn't searched."""

    def text_and_spans(self, document: int, most: int) -> tuple[bytes, list[_Span]]:
        """A document's text and the first matches in it."""


class _BytesOfTokens:
    """Searches what byte-level tokens stand for."""

    def __init__(self, store: Store, tokenizer: Tokenizer, passage: bytes, *, ignore_case: bool) -> None:
        self._store = store
        self._passage = passage
        self._begin = tokenizer.spec.begin_ids
        table = [*tokenizer.spec.token_bytes, b""]
        self._blank = len(table) - 1  # stands for begin and end tokens, which aren't text
        self._shown_table = _binary_array(table)
        self._lengths = np.array([len(data) for data in table], np.int64)
        self._table = _binary_array([data.lower() for data in table]) if ignore_case else self._shown_table
        self._cover: npt.NDArray[np.bool_] | None = None
        self._covered = 0

    def counts(self, documents: Integers, on_progress: Callable[[int, int], None]) -> Integers:
        found = np.zeros(self._store.num_documents, np.int64)
        # As they lie on disk: a million rows of a table, read one by one, would take longer than their search.
        documents = documents[np.lexsort([self._store.arrays[name][documents] for name in ("offset", "segment")])]
        stream = _Stream(self._store, documents)
        for start in range(0, stream.num_tokens, STRETCH_TOKENS):
            end = min(start + STRETCH_TOKENS, stream.num_tokens)
            for starts in self._matches(stream, start, end):
                places = np.searchsorted(stream.starts, starts, side="right") - 1
                if len(places):
                    counts = np.bincount(places - places[0])
                    found[documents[int(places[0]) : int(places[0]) + len(counts)]] += counts
            on_progress(end, stream.num_tokens)
        return found

    def text_and_spans(self, document: int, most: int) -> tuple[bytes, list[_Span]]:
        stream = _Stream(self._store, np.array([document]))
        ids = self._ids(stream, 0, stream.num_tokens)
        searched, borders = _joined(self._table, ids)
        starts = np.array(_found_in(searched, self._passage, most), np.int64)
        first = np.searchsorted(borders, starts, side="right") - 1
        last = np.searchsorted(borders, starts + len(self._passage) - 1, side="right") - 1
        spans = [
            _Span(start=start, end=start + len(self._passage), first_token=one, last_token=other)
            for start, one, other in zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)
        ]
        return _joined(self._shown_table, ids)[0], spans

    def _matches(self, stream: _Stream, start: int, end: int) -> Iterator[Integers]:
        """Stream positions of the tokens that matches begin in, between two positions."""
        # What begins before `end` may go on behind it; a token is one byte at least.
        ids = self._ids(stream, start, min(end + len(self._passage), stream.num_tokens))
        if self._cover is None:
            self._cover, self._covered = self._rarest_cover(ids)
        picked = self._around(np.flatnonzero(np.take(self._cover, ids)), len(ids))
        num_bytes = int(self._lengths[ids if picked is None else ids[picked]].sum())
        if num_bytes > STRETCH_BYTES and end - start > 1:  # tokens of a hundred spaces, for instance
            middle = (start + end) // 2
            yield from self._matches(stream, start, middle)
            yield from self._matches(stream, middle, end)
        elif num_bytes:
            found = start + self._begins(ids, picked, stream.borders(start, start + len(ids)) - start)
            yield found[found < end]

    def _ids(self, stream: _Stream, start: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens of a stretch, begin and end tokens blanked out."""
        ids = stream.read(start, end).astype(np.int32)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._blank:
            raise DamagedStoreError(
                f"{self._store.path} holds token {int(ids.max())}, its vocabulary ends at {self._blank - 1}",
                hint="`penstock verify STORE` lists all damage; prepare the data again",
            )
        ids[stream.borders(start + 1, end + 1) - 1 - start] = self._blank
        for place, begin in enumerate(self._begin):
            at = stream.borders(start - place, end - place) + place - start
            ids[at[ids[at] == begin]] = self._blank
        return ids

    def _around(self, covered: Integers, num_ids: int) -> Integers | None:
        """Numbers of the tokens that may be part of a match; None for all."""
        if len(covered) * len(self._passage) > MOST_PICKED * num_ids:
            return None
        # As many tokens before and behind as the passage has bytes there; overlapping surroundings become one.
        starts = np.maximum(covered - self._covered, 0)
        ends = np.minimum(covered + len(self._passage) - self._covered, num_ids)
        apart = starts[1:] > ends[:-1]
        starts = starts[np.concatenate([np.ones(min(len(covered), 1), np.bool_), apart])]
        ends = ends[np.concatenate([apart, np.ones(min(len(covered), 1), np.bool_)])]
        sizes = ends - starts
        return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))

    def _begins(self, ids: npt.NDArray[np.int32], picked: Integers | None, borders: Integers) -> Integers:
        """Numbers of the tokens that matches begin in; `borders` are those that documents begin with."""
        text, edges = _joined(self._table, ids if picked is None else ids[picked])
        starts = _all_found_in(text, self._passage)
        first = np.searchsorted(edges, starts, side="right") - 1
        last = np.searchsorted(edges, starts + len(self._passage) - 1, side="right") - 1
        if picked is not None:
            together = picked[last] - picked[first] == last - first
            first, last = picked[first[together]], picked[last[together]]
        inside = np.searchsorted(borders, first, side="right") == np.searchsorted(borders, last, side="right")
        begins: Integers = first[inside]
        return begins

    def _rarest_cover(self, sample: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.bool_], int]:
        """Which tokens can cover one byte of the passage, and which byte: the one whose tokens are rarest here."""
        counts = np.bincount(sample, minlength=self._blank + 1)
        step = max(len(self._passage) // POSITIONS_WEIGHED, 1)
        covers = [(self._covering(place), place) for place in range(0, len(self._passage), step)]
        tokens, place = min(covers, key=lambda cover: int(counts[cover[0]].sum()))
        mask = np.zeros(self._blank + 1, np.bool_)
        mask[tokens] = True
        return mask, place

    @cached_property
    def _spelt(self) -> tuple[npt.NDArray[np.uint8], Integers, Integers]:
        """All tokens' bytes joined; of each byte its token, and of each token where it begins."""
        text, borders = _joined(self._table, np.arange(self._blank + 1, dtype=np.int32))
        starts = borders[:-1].astype(np.int64)
        return np.frombuffer(text, np.uint8), np.repeat(np.arange(self._blank + 1), self._lengths), starts

    def _covering(self, place: int) -> Integers:
        """Tokens that agree with the passage when one of their bytes lies at `place` of it."""
        spelt, owners, starts = self._spelt
        passage = np.frombuffer(self._passage, np.uint8)
        at = np.flatnonzero(spelt == passage[place])
        for direction in (1, -1):
            distance = direction
            agreed = []
            while len(at) and 0 <= place + distance < len(passage):
                token = owners[at]
                within = at - starts[token] + distance
                goes_on = (within >= 0) & (within < self._lengths[token])
                agreed.append(at[~goes_on])
                at = at[goes_on]
                at = at[spelt[at + distance] == passage[place + distance]]
                distance += direction
            at = np.concatenate([at, *agreed])
        covering: Integers = np.unique(owners[at])
        return covering


class _DecodedText:
    """Searches documents decoded by `tokenizers`, for vocabularies whose tokens have no bytes of their own."""

    def __init__(self, store: Store, tokenizer: Tokenizer, passage: bytes, *, ignore_case: bool) -> None:
        from tokenizers import Tokenizer as Reference

        self._store = store
        self._passage = passage
        self._ignore_case = ignore_case
        self._begin = tokenizer.spec.begin_ids
        self._decoder = Reference.from_str(tokenizer.spec.source_json.decode())

    def counts(self, documents: Integers, on_progress: Callable[[int, int], None]) -> Integers:
        found = np.zeros(self._store.num_documents, np.int64)
        lengths = self._store.arrays["length"][documents].astype(np.int64)
        ends = np.cumsum(lengths)
        first = 0
        while first < len(documents):
            done = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, done + DECODED_AT_ONCE_TOKENS, side="right")), first + 1)
            for number, text in zip(documents[first:last].tolist(), self._texts(documents[first:last]), strict=True):
                found[number] = len(_all_found_in(self._searched(text), self._passage))
            on_progress(int(ends[last - 1]), int(ends[-1]))
            first = last
        return found

    def text_and_spans(self, document: int, most: int) -> tuple[bytes, list[_Span]]:
        [text] = self._texts(np.array([document]))
        last = int(self._store.arrays["length"][document]) - 1
        return text, [
            _Span(start=start, end=start + len(self._passage), first_token=0, last_token=last)
            for start in _found_in(self._searched(text), self._passage, most)
        ]

    def _texts(self, documents: Integers) -> list[bytes]:
        ids = [self._store.document_tokens(number)[:-1].tolist() for number in documents.tolist()]
        begin = list(self._begin)
        without = [tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens for tokens in ids]
        texts: list[str] = self._decoder.decode_batch(without, skip_special_tokens=False)
        return [text.encode("utf-8", "surrogatepass") for text in texts]

    def _searched(self, text: bytes) -> bytes:
        return text.lower() if self._ignore_case else text


class _Stream:
    """Documents one after another as one stream of tokens, read by position.

    Attributes:
        starts: [D + 1] stream position of each document, then the number of tokens.
    """

    def __init__(self, store: Store, documents: Integers) -> None:
        self._store = store
        segments, offsets, lengths = (
            store.arrays[name][documents].astype(np.int64) for name in ("segment", "offset", "length")
        )
        self.starts: Integers = np.concatenate([[0], np.cumsum(lengths)])
        self.num_tokens = int(self.starts[-1])
        # Neighbours in the store are read at once.
        follows = (segments[1:] == segments[:-1]) & (offsets[1:] == offsets[:-1] + lengths[:-1])
        begins = np.flatnonzero(np.concatenate([np.ones(min(len(documents), 1), np.bool_), ~follows]))
        self._piece_starts = np.append(self.starts[begins], self.num_tokens)
        self._segments, self._offsets = segments[begins], offsets[begins]

    def read(self, start: int, end: int) -> npt.NDArray[Any]:
        """Checked tokens from one position to another."""
        if start >= end:
            return np.empty(0, self._store.dtype)
        first = int(np.searchsorted(self._piece_starts, start, side="right")) - 1
        last = int(np.searchsorted(self._piece_starts, end, side="left"))
        pieces = []
        for number in range(first, last):
            begin = max(start, int(self._piece_starts[number]))
            stop = min(end, int(self._piece_starts[number + 1]))
            offset = int(self._offsets[number]) + begin - int(self._piece_starts[number])
            pieces.append(self._store.read(int(self._segments[number]), offset, stop - begin))
        return np.concatenate(pieces)

    def borders(self, start: int, end: int) -> Integers:
        """Where documents begin, or the last one ends, from one position up to before another."""
        first, last = np.searchsorted(self.starts, (start, end)).tolist()
        return self.starts[first:last]


def _binary_array(values: list[bytes]) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.large_binary())


def _joined(table: Any, ids: npt.NDArray[np.int32]) -> tuple[bytes, Integers]:
    """The bytes of some tokens joined, and where each begins, then their number."""
    import pyarrow as pa

    taken = table.take(pa.array(ids))
    _, borders, data = taken.buffers()
    edges = np.frombuffer(borders, np.int64)[: len(ids) + 1] if len(ids) else np.zeros(1, np.int64)
    return (data[: int(edges[-1])].to_pybytes() if data is not None else b""), edges


def _found_in(text: bytes, passage: bytes, most: int) -> list[int]:
    """Where the passage begins in a text, the first few times; matches may overlap."""
    found: list[int] = []
    at = text.find(passage)
    while at >= 0 and len(found) < most:
        found.append(at)
        at = text.find(passage, at + 1)
    return found


def _all_found_in(text: bytes, passage: bytes) -> Integers:
    """The same, every time; without a step of Python per match, of which a letter has millions."""
    if passage not in text:
        return np.empty(0, np.int64)
    letters = np.frombuffer(text, np.uint8)[: len(text) - len(passage) + 1]
    found: Integers = np.flatnonzero(letters == passage[0])
    for place in range(1, len(passage), 8):
        wanted = passage[place : place + 8]
        # Eight letters at once, as a number that begins at any byte; at the passage's end, the eight that end there.
        if len(wanted) < 8 <= len(passage):
            place, wanted = len(passage) - 8, passage[-8:]
        if len(wanted) == 8:
            words = np.ndarray((len(text) - 7,), "<u8", buffer=text, strides=(1,))
            found = found[words[found + place] == int.from_bytes(wanted, "little")]
            continue
        for offset, letter in enumerate(wanted, start=place):
            found = found[np.frombuffer(text, np.uint8)[found + offset] == letter]
    return found
