"""Ids of new words by a Unigram model, thousands of words at a time.

In: pieces of text (see `cuts`) that weren't met before. Out: the ids that `tokenizers` gives them. A word of printable
ASCII, behind white space or not, is segmented here; every other piece, words longer than 64 characters and words with
something unknown in them go to `tokenizers`. What white space before a word becomes is asked of the tokenizer itself,
once for each kind; what its normalizer does to the word is known, or the whole encoder is left to `tokenizers`.

The best segmentation is the one `tokenizers` finds, by the same steps on many words at once. From left to right, each
place in a word has the best sum of scores that ends there; from it every piece of the vocabulary that follows is tried,
found in a trie, and becomes the best at its end if its sum is greater. Sums are of the same 64-bit floats in the same
order, and of equal ones the first stays, so that no rounding and no tie is decided otherwise.

Memory: 512 bytes for each beginning of a piece that another character can follow (about 4 MB for 8,000 pieces; a
vocabulary that would need more than 64 MiB is left to `tokenizers`), and some megabytes for a chunk of words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.tokenize.ascii_words import BLANKS, WordRules, word_rules
from penstock.tokenize.cuts import SPACE

__all__ = ["UnigramWords", "unigram_words"]

Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

UNKNOWN_PENALTY = 10.0  # K_UNK_PENALTY of `tokenizers`
MOST_TABLE_ENTRIES = 2**24
LONGEST_WORD = 64
WORDS_PER_CHUNK = 2**13
MOST_LEADS = 2**12

# Rows of the trie have a column for each byte of ASCII. A space stands for the mark ▁: no space reaches the model.
COLUMNS_AS_SHIFT = 7
ROOT = 0
UNKNOWN = -1

_MODEL_KEYS = {"type", "unk_id", "vocab", "byte_fallback"}


@dataclass(frozen=True, kw_only=True)
class Trie:
    """The vocabulary by its characters; nodes that others follow are numbered first, from the root, 0.

    Attributes:
        following: node << 7 | byte -> the next node, 0 for none.
        num_inner: nodes from here on have none that follow.
        piece: node -> id of the piece that ends there; UNKNOWN where none does, and for the node UNKNOWN, the last.
        score: node -> its score; -inf where none does.
    """

    following: Integers
    num_inner: int
    piece: Integers
    score: Floats


@dataclass(frozen=True, kw_only=True)
class Lead:
    """What stands before a word: ids of its own, then marks that belong to the word."""

    ids: npt.NDArray[np.uint32]
    marks: bytes


class UnigramWords:
    """An encoder of new pieces; used by one thread."""

    def __init__(
        self,
        trie: Trie,
        rules: WordRules,
        *,
        unknown_score: float,
        encode_others: Callable[[Sequence[bytes]], Encoded],
    ) -> None:
        self._trie = trie
        self._rules = rules
        self._unknown_score = unknown_score
        self._encode_others = encode_others
        self._leads: dict[bytes, Lead | None] = {}

    def encode(self, pieces: Sequence[bytes]) -> Encoded:
        """Flat ids and the n + 1 borders between the pieces."""
        words, leads, numbers = self._plain(pieces)
        word_ids, word_lengths, known = self._segmented(words)
        words_known = np.flatnonzero(known)
        numbers, word_lengths = numbers[words_known], word_lengths[words_known]
        lead_ids = [leads[word].ids for word in words_known.tolist()]
        lead_lengths = np.fromiter(map(len, lead_ids), np.int64, count=len(lead_ids))
        is_other = np.ones(len(pieces), np.bool_)
        is_other[numbers] = False
        others = np.flatnonzero(is_other)
        other_ids, other_offsets = self._encode_others([pieces[number] for number in others.tolist()])
        lengths = np.empty(len(pieces), np.int64)
        lengths[numbers] = lead_lengths + word_lengths
        lengths[others] = np.diff(other_offsets)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        ids = np.empty(int(offsets[-1]), np.uint32)
        ids[_runs(offsets[others], lengths[others])] = other_ids
        ids[_runs(offsets[numbers], lead_lengths)] = np.concatenate([np.empty(0, np.uint32), *lead_ids])
        ids[_runs(offsets[numbers] + lead_lengths, word_lengths)] = word_ids
        return ids, offsets

    def _plain(self, pieces: Sequence[bytes]) -> tuple[list[bytes], list[Lead], Places]:
        """The words that can be segmented here, as the model sees them, what stands before each, and their pieces."""
        rules = self._rules
        words: list[bytes] = []
        leads: list[Lead] = []
        numbers: list[int] = []
        for number, piece in enumerate(pieces):
            word = piece.lstrip(BLANKS)
            size = len(word)
            if not 0 < size <= LONGEST_WORD or word.translate(None, rules.kept):
                continue
            blanks = piece[:-size]
            lead = self._leads[blanks] if blanks in self._leads else self._new_lead(blanks)
            if lead is None or (rules.replaced and any(text in word.lower() for text in rules.replaced)):
                continue
            words.append(lead.marks + (word.lower() if rules.lowers else word))
            leads.append(lead)
            numbers.append(number)
        return words, leads, np.array(numbers, np.int64)

    def _new_lead(self, blanks: bytes) -> Lead | None:
        """What these blanks become before a word; None where that can't be told."""
        if len(self._leads) >= MOST_LEADS:
            self._leads.clear()
        lead = self._leads[blanks] = self._told_lead(blanks)
        return lead

    def _told_lead(self, blanks: bytes) -> Lead | None:
        parts, probe = self._rules.parts_before(blanks), self._rules.probe
        if parts is None or max(map(len, parts)) > LONGEST_WORD:
            return None
        ids, counts, known = self._segmented([*parts[:-1], parts[-1] + probe])
        true_ids, _ = self._encode_others([blanks + probe])
        if not known.all() or not np.array_equal(ids, true_ids):
            return None
        return Lead(ids=ids[: counts[:-1].sum()], marks=parts[-1])

    def _segmented(self, words: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], Places, npt.NDArray[np.bool_]]:
        """Ids of the words that hold nothing unknown, one after the other; how many each has; which words those are."""
        lengths = np.fromiter(map(len, words), np.int64, count=len(words))
        ends = np.cumsum(lengths)
        data = np.frombuffer(b"".join(words), np.uint8)
        counts = np.zeros(len(words), np.int64)
        known = np.zeros(len(words), np.bool_)
        order = np.argsort(-lengths, kind="stable")  # words of a chunk are of about one length, the longest first
        chunks = []
        for first in range(0, len(words), WORDS_PER_CHUNK):
            chosen = order[first : first + WORDS_PER_CHUNK]
            chunk = _Chunk(self._trie, data, (ends - lengths)[chosen], lengths[chosen])
            chunk.find_best(self._unknown_score)
            ids, counts[chosen], known[chosen] = chunk.best_pieces()
            chunks.append(ids)
        counts[~known] = 0
        flat = np.concatenate([np.empty(0, np.uint32), *chunks])
        # From the order of the chunks to that of the words.
        starts = np.empty(len(words), np.int64)
        starts[order] = np.cumsum(counts[order]) - counts[order]
        return flat[_runs(starts, counts)], counts, known


class _Chunk:
    """Some words side by side, the longest first: row p of each table is of the place after p characters."""

    def __init__(self, trie: Trie, data: npt.NDArray[np.uint8], starts: Places, lengths: Places) -> None:
        self._trie = trie
        self._lengths = lengths
        longest = int(lengths[0])
        rows = np.arange(longest)[:, None]
        # Past a word's end stands whatever; no step looks there.
        self._symbols = data[np.minimum(starts + rows, data.size - 1)].astype(np.int32)
        # How many words have more than p characters: they are the first so many.
        self._num_longer = np.searchsorted(-lengths, -np.arange(longest + 1), side="left").tolist()
        self._scores = np.full((longest + 1, lengths.size), -math.inf)
        self._scores[0] = 0.0
        self._nodes = np.full((longest + 1, lengths.size), UNKNOWN, np.int32)
        self._sizes = np.zeros((longest + 1, lengths.size), np.int32)

    def find_best(self, unknown_score: float) -> None:
        """Fills, for each place, the best sum of scores that ends there, and the last piece of that sum."""
        for place in range(len(self._symbols)):
            self._try_from(place, unknown_score)

    def _try_from(self, place: int, unknown_score: float) -> None:
        """Every piece that begins at this place, shorter ones first, then the unknown one."""
        trie, count = self._trie, self._num_longer[place]
        so_far = self._scores[place, :count]
        nodes = trie.following[self._symbols[place, :count]]  # the root's row is the first
        single = trie.score[nodes]
        self._improve(place, 1, slice(0, count), single + so_far, nodes)
        lacking = np.flatnonzero(single == -math.inf)
        if lacking.size:
            unknown = np.full(lacking.size, UNKNOWN, np.int32)
            self._improve(place, 1, lacking, unknown_score + so_far[lacking], unknown)
        words: Any = np.flatnonzero((nodes < trie.num_inner) & (nodes > ROOT))
        nodes = nodes[words]
        for size in range(2, len(self._symbols) - place + 1):
            words = words[: np.searchsorted(words, self._num_longer[place + size - 1])]
            if not words.size:
                return
            nodes = trie.following[(nodes[: words.size] << COLUMNS_AS_SHIFT) | self._symbols[place + size - 1][words]]
            alive = nodes > ROOT
            words, nodes = words[alive], nodes[alive]
            self._improve(place, size, words, trie.score[nodes] + so_far[words], nodes)
            inner = nodes < trie.num_inner
            words, nodes = words[inner], nodes[inner]

    def _improve(self, place: int, size: int, words: Any, sums: Floats, nodes: Integers) -> None:
        """Takes these pieces for the best that end there where their sums are greater than those found before."""
        end = place + size
        better = sums > self._scores[end, words]
        chosen = np.flatnonzero(better) if isinstance(words, slice) else words[better]
        self._scores[end, chosen] = sums[better]
        self._nodes[end, chosen] = nodes[better]
        self._sizes[end, chosen] = size

    def best_pieces(self) -> tuple[npt.NDArray[np.uint32], Places, npt.NDArray[np.bool_]]:
        """Ids of the words without unknown pieces, one after the other; how many each word has; which those are."""
        steps = []
        places, words = self._lengths.copy(), np.arange(self._lengths.size)
        counts, known = np.zeros(words.size, np.int64), np.ones(words.size, np.bool_)
        while words.size:
            pieces = self._trie.piece[self._nodes[places[words], words]]
            known[words[pieces == UNKNOWN]] = False
            steps.append((words, pieces))
            counts[words] += 1
            places[words] -= self._sizes[places[words], words]
            words = words[places[words] > 0]
        counts[~known] = 0
        ends = np.cumsum(counts)
        ids = np.empty(int(ends[-1]), np.uint32)
        for back, (words, pieces) in enumerate(steps, start=1):
            sound = known[words]
            ids[ends[words[sound]] - back] = pieces[sound]
        return ids, counts, known


def _runs(starts: Places, lengths: Places) -> Places:
    """The numbers from each start on, so many, one run after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def unigram_words(
    encoder: dict[str, Any], loaded_model: dict[str, Any], encode_others: Callable[[Sequence[bytes]], Encoded]
) -> UnigramWords | None:
    """An encoder of new pieces for this tokenizer, if all that it does to ASCII words is known here.

    Args:
        encoder: of a tokenizer.json, for which `cut_pattern` has a rule.
        loaded_model: its model as `tokenizers` writes it. Of the scores that it reads from decimals every fourth is the
            neighbour of the nearest float, and it adds up those.
        encode_others: `tokenizers` with it.
    """
    model = loaded_model
    if model.get("type") != "Unigram" or not model.keys() <= _MODEL_KEYS or type(model.get("unk_id")) is not int:
        return None
    rules = word_rules(encoder)
    scores = [score for _, score in model["vocab"]]
    if rules is None or not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        return None
    trie = _trie(model["vocab"], model["unk_id"])
    if trie is None:
        return None
    return UnigramWords(trie, rules, unknown_score=min(scores) - UNKNOWN_PENALTY, encode_others=encode_others)


def _trie(vocabulary: Sequence[tuple[str, float]], unknown_id: int) -> Trie | None:
    """The pieces of ASCII and marks of space; None where the table would be too large."""
    number_of = {piece: number for number, (piece, _) in enumerate(vocabulary)}  # of equal pieces the last one counts
    edges: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    num_nodes = 1
    for piece, number in number_of.items():
        spelt = piece.replace(SPACE, "")
        if not piece or " " in piece or not spelt.isascii():
            continue
        node = ROOT
        for byte in piece.replace(SPACE, " ").encode():
            following = edges.setdefault((node, byte), num_nodes)
            num_nodes += following == num_nodes
            node = following
        ends[node] = number
    inner = {ROOT, *(node for node, _ in edges)}
    if len(inner) << COLUMNS_AS_SHIFT > MOST_TABLE_ENTRIES:
        return None
    renumbered = np.argsort(np.argsort([node not in inner for node in range(num_nodes)], kind="stable"))
    following_table = np.zeros(len(inner) << COLUMNS_AS_SHIFT, np.int32)
    if edges:
        nodes, symbols = np.array(list(edges), np.int64).T
        following_table[renumbered[nodes] << COLUMNS_AS_SHIFT | symbols] = renumbered[list(edges.values())]
    piece_of, score_of = np.full(num_nodes + 1, UNKNOWN, np.int32), np.full(num_nodes, -math.inf)
    for node, number in ends.items():
        # The unknown piece itself, spelt out, isn't told from what is unknown.
        piece_of[renumbered[node]] = UNKNOWN if number == unknown_id else number
        score_of[renumbered[node]] = vocabulary[number][1]
    return Trie(following=following_table, num_inner=len(inner), piece=piece_of, score=score_of)
