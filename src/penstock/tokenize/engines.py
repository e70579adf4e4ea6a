"""The two programs that turn text into ids, behind one call, and the choice between them.

`encode(list of UTF-8 bytes) -> (flat uint32 ids, int64 offsets)`. gigatoken is 50-300 times faster; `tokenizers` is the
reference. gigatoken is used when it loads the vocabulary and agrees with the reference on a fixed torture text (0.6 s
for 50,000 ids, seconds for 200,000; once passed on this machine it isn't repeated, see `verdicts`); otherwise
`tokenizers` is, and the reason is recorded. Where texts can be cut safely (see `cuts`) the ids of their pieces are
remembered, on 8 MB of code 4 to 7 times as fast as whole texts for byte-level BPE and WordPiece. Of a Unigram
vocabulary's words too many are new for that to help, so new ones are segmented here, many at once (see `unigram`).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import TokenizerError
from penstock.tokenize.cuts import cut_pattern
from penstock.tokenize.guard import Guard, reason_against_gigatoken
from penstock.tokenize.pieces import PieceMemory
from penstock.tokenize.specification import TokenizerSpec
from penstock.tokenize.unigram import unigram_words
from penstock.tokenize.vanishing import refuse_vanishing_tokens
from penstock.tokenize.verdicts import date_of_passed_check, keep_passed_check, verdict_name

__all__ = [
    "Encoded",
    "Engine",
    "EngineChoice",
    "GigatokenEngine",
    "ReferenceEngine",
    "RememberingEngine",
    "UnigramEngine",
    "choose_engine",
]

Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]

# gigatoken's calls for a batch import awkward, 0.2 s; those for a text don't, and take 1 ms more per MB.
FIRST_BYTES = 2**25

# Words made of pieces of a Unigram vocabulary, for its self-check; `tokenizers` takes 12 µs a word.
GLUED_PIECES = 4000


class Engine(Protocol):
    """One encoder, used by one thread."""

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Flat ids and the n + 1 borders between the texts."""


class GigatokenEngine:
    """gigatoken on the calling thread, with the GIL released.

    An instance locks itself while it encodes, so each thread has its own: two threads on one instance ran at 200 MB/s
    together, on two instances at 380. Texts with a character that the two engines know differently (see `guard`) are
    encoded by the reference. The first `FIRST_BYTES` are encoded text by text, which needs no further import.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        from gigatoken import Tokenizer

        self._spec = spec
        self._first_bytes = FIRST_BYTES
        self._tokenizer = Tokenizer.from_json(spec.encoder_json)
        self._guard = Guard.for_tokenizer(spec, engine_versions())
        self._cuts = cut_pattern(spec.encoder)

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """See `Engine`."""
        if self._first_bytes <= 0 or "awkward" in sys.modules:
            return self.encode_by(self.together, texts)
        self._first_bytes -= sum(map(len, texts))
        return self.encode_by(self.one_by_one, texts)

    def encode_by(self, way: Callable[[Sequence[bytes]], Encoded], texts: Sequence[bytes]) -> Encoded:
        """The same in one of the two ways; the self-check asks for both."""
        if not texts:
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        guarded = self._guard.guarded(texts)
        return self._encode_apart(texts, guarded) if guarded else way(texts)

    def together(self, texts: Sequence[bytes]) -> Encoded:
        """Texts without such characters, in one native call."""
        layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)

    def one_by_one(self, texts: Sequence[bytes]) -> Encoded:
        """The same, a call for each."""
        ids = [self._tokenizer.encode(text) for text in texts]
        return np.concatenate(ids), np.cumsum([0, *map(len, ids)], dtype=np.int64)

    def _encode_apart(self, texts: Sequence[bytes], guarded: Sequence[int]) -> Encoded:
        """The texts at these positions by the reference, the others here."""
        apart = set(guarded)
        ids, offsets = self.encode([b"" if number in apart else text for number, text in enumerate(texts)])
        pieces: list[npt.NDArray[np.uint32]] = []
        lengths, done = np.diff(offsets), 0
        for number in guarded:
            true_ids = self._encode_guarded(texts[number])
            pieces += [ids[done : offsets[number]], true_ids]
            done = int(offsets[number])
            lengths[number] = true_ids.size
        return np.concatenate([*pieces, ids[done:]]), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def _encode_guarded(self, text: bytes) -> npt.NDArray[np.uint32]:
        """A text with such characters: where cutting is known to be safe, only the pieces around them cost time."""
        if self._cuts is None:
            return self._reference.encode([text])[0]
        pieces = self._cuts.findall(text)
        guarded = self._guard.guarded(pieces)
        stretches, done = [], 0
        for number in guarded:
            stretches += [b"".join(pieces[done:number]), pieces[number]]
            done = number + 1
        stretches.append(b"".join(pieces[done:]))
        fast_ids, fast = self.encode(stretches[::2])
        slow_ids, slow = self._reference.encode(stretches[1::2])
        joined = [fast_ids[: fast[1]]]
        for number in range(len(guarded)):
            joined += [slow_ids[slow[number] : slow[number + 1]], fast_ids[fast[number + 1] : fast[number + 2]]]
        return np.concatenate(joined)

    @property
    def exception(self) -> str:
        """Which texts it leaves to the reference, to be said after the reason why it runs."""
        count = self._guard.num_characters
        return f"; texts with one of {count:,} characters that it knows differently go to tokenizers" if count else ""

    @cached_property
    def _reference(self) -> ReferenceEngine:
        return ReferenceEngine(self._spec)  # takes up to seconds to load, and most corpora never need it


@cache
def _keep_forked_children_to_one_thread() -> None:
    """Makes `tokenizers` sequential in processes forked from here on.

    Its thread pool doesn't live through a fork: a child that used it would wait for ever, or start one thread per core
    beside the other children. It looks at this variable at each call. Here, in the parent, it stays what it was.
    """
    variable = "TOKENIZERS_PARALLELISM"
    values: list[str | None] = []

    def before() -> None:
        values.append(os.environ.get(variable))
        os.environ[variable] = "false"

    def after_in_parent() -> None:
        value = values.pop()
        if value is None:
            del os.environ[variable]
        else:
            os.environ[variable] = value

    os.register_at_fork(before=before, after_in_parent=after_in_parent)


class ReferenceEngine:
    """Hugging Face `tokenizers`, on its own thread pool (in forked processes on the calling thread), GIL released."""

    def __init__(self, spec: TokenizerSpec) -> None:
        from tokenizers import Tokenizer

        _keep_forked_children_to_one_thread()
        self._tokenizer = Tokenizer.from_str(spec.encoder_json)
        refuse_vanishing_tokens(self._tokenizer)
        self._true_ids = self._renumbering(spec)

    def _renumbering(self, spec: TokenizerSpec) -> npt.NDArray[np.uint32] | None:
        """Id given -> id meant, where they differ.

        `tokenizers` numbers added tokens anew when it loads them: those that come after a dropped control move down,
        the first onto the very id of that control.
        """
        given = [self._tokenizer.token_to_id(name) for name in spec.kept_tokens]
        meant = list(spec.kept_tokens.values())
        if given == meant:
            return None
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        true_ids = np.arange(highest + 1, dtype=np.uint32)
        true_ids[np.array(given, np.int64)] = meant
        return true_ids

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """See `Engine`.

        Raises:
            TokenizerError: it fails on one of the texts, as some combinations of normalizer and added tokens make it.
        """
        decoded = [text.decode() for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # its panics are no Exception
            raise TokenizerError(
                f"tokenizers fails on a text with this tokenizer: {error}",
                hint="a fault of the tokenizer's file; look at its added tokens and its normalizer",
            ) from error
        lengths = [len(encoding) for encoding in encodings]
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        numbers = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        ids = np.fromiter(numbers, np.uint32, count=int(offsets[-1]))
        return ids if self._true_ids is None else self._true_ids[ids], offsets

    def loaded_model(self) -> dict[str, Any]:
        """The model of its tokenizer.json, with every number as it is in its memory."""
        model: dict[str, Any] = json.loads(self._tokenizer.to_str())["model"]
        return model


class RememberingEngine:
    """`tokenizers` for what it hasn't met before, and memory for the rest."""

    def __init__(self, spec: TokenizerSpec) -> None:
        pattern = cut_pattern(spec.encoder)
        if pattern is None:
            raise TokenizerError(
                "no rule says where texts of this tokenizer may be cut", hint="use the reference engine for it"
            )
        self._memory = PieceMemory(pattern, self._encoder_of_new_pieces(spec))

    def _encoder_of_new_pieces(self, spec: TokenizerSpec) -> Callable[[Sequence[bytes]], Encoded]:
        return ReferenceEngine(spec).encode

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """See `Engine`."""
        return self._memory.encode(texts)


class UnigramEngine(RememberingEngine):
    """The same with new ASCII words segmented here, and `tokenizers` for other new pieces."""

    def _encoder_of_new_pieces(self, spec: TokenizerSpec) -> Callable[[Sequence[bytes]], Encoded]:
        reference = ReferenceEngine(spec)
        words = unigram_words(spec.encoder, reference.loaded_model(), reference.encode)
        if words is None:
            raise TokenizerError(
                "no rule says what the model of this tokenizer sees of a word", hint="use the remembering engine for it"
            )
        return words.encode


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine runs, and why."""

    name: str
    reason: str
    build: type[GigatokenEngine] | type[ReferenceEngine] | type[RememberingEngine] | type[UnigramEngine]


def choose_engine(spec: TokenizerSpec) -> tuple[EngineChoice, Engine]:
    """gigatoken if it agrees with `tokenizers` on the torture text, else `tokenizers`; and the engine, ready to use.

    Raises:
        TokenizerError: the vocabulary can't be loaded at all, fails on a torture text, or lets text reach a control
            token.
    """
    _keep_forked_children_to_one_thread()  # before any fork, whichever engine it will be
    texts = torture_texts(spec)
    verdict = verdict_name(spec.digest, texts, engine_versions())
    passed_before = _gigatoken_passed_before(spec, verdict)
    if passed_before is not None:
        return passed_before
    try:
        reference = ReferenceEngine(spec)
        expected = reference.encode(texts)
    except (KeyboardInterrupt, SystemExit, TokenizerError):
        raise
    except BaseException as error:  # it raises bare Exception, or panics, over whatever it can't use
        raise TokenizerError(
            f"the tokenizer can't be loaded: {error}", hint="check it with tokenizers.Tokenizer.from_file"
        ) from error
    _refuse_reachable_controls(spec, expected)
    checked = _checked_gigatoken(spec, texts, expected)
    if isinstance(checked, str):
        return _reference_choice(spec, reference, checked, texts)
    keep_passed_check(verdict)
    reason = f"agrees with tokenizers on {len(texts)} torture texts{checked.exception}"
    return EngineChoice(name="gigatoken", reason=reason, build=GigatokenEngine), checked


def _gigatoken_passed_before(spec: TokenizerSpec, verdict: str) -> tuple[EngineChoice, Engine] | None:
    date = date_of_passed_check(verdict)
    if date is None:
        return None
    try:
        engine = GigatokenEngine(spec)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001  it loaded when it was checked; the full check finds out what is wrong now
        return None
    reason = f"agrees with tokenizers on the torture texts, checked on {date}{engine.exception}"
    return EngineChoice(name="gigatoken", reason=reason, build=GigatokenEngine), engine


def _reference_choice(
    spec: TokenizerSpec, reference: ReferenceEngine, reason: str, texts: Sequence[bytes]
) -> tuple[EngineChoice, Engine]:
    """`tokenizers`, and beside it what a rule allows and what gives the same ids on the torture texts."""
    if cut_pattern(spec.encoder) is None:
        return EngineChoice(name="tokenizers", reason=reason, build=ReferenceEngine), reference
    joined = [*texts, *(glue.join(texts) for glue in (b"", b" ", b"\n", b"x")), *_glued_unigram_pieces(spec)]
    expected = reference.encode(joined)
    beside: list[tuple[type[RememberingEngine], str]] = [
        (UnigramEngine, "ids of repeated words are remembered, new ASCII words are segmented many at once"),
        (RememberingEngine, "ids of repeated words are remembered"),
    ]
    for build, what in beside:
        try:
            engine = build(spec)
        except TokenizerError:  # it has no rule for this tokenizer
            continue
        if all(itertools.starmap(np.array_equal, zip(engine.encode(joined), expected, strict=True))):
            return EngineChoice(name="tokenizers", reason=f"{reason}; {what}", build=build), engine
    return EngineChoice(name="tokenizers", reason=reason, build=ReferenceEngine), reference


def _glued_unigram_pieces(spec: TokenizerSpec) -> list[bytes]:
    """Pieces of a Unigram vocabulary from all over it, three in a word, so that segmentations compete."""
    vocabulary = spec.encoder["model"]["vocab"]
    if spec.encoder["model"].get("type") != "Unigram":
        return []
    pieces = [entry[0].replace("▁", " ") for entry in vocabulary[:: max(1, len(vocabulary) // GLUED_PIECES)]]
    shifted = (pieces[shift:] + pieces[:shift] for shift in (0, 7, 131))
    return ["".join(glued).encode(errors="replace") for glued in zip(*shifted, strict=True)]


def _checked_gigatoken(spec: TokenizerSpec, texts: Sequence[bytes], expected: Encoded) -> GigatokenEngine | str:
    """gigatoken, or why it can't be used."""
    try:
        engine = GigatokenEngine(spec)
        if (reason := reason_against_gigatoken(spec)) is not None:
            return reason
        both = [engine.encode_by(way, texts) for way in (engine.one_by_one, engine.together)]
    except ImportError:
        return "gigatoken isn't installed"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a refusal of any kind means the other engine; panics are no Exception
        return f"gigatoken refuses this tokenizer: {(str(error).splitlines() or [type(error).__name__])[0]}"
    for ids, offsets in both:
        if not np.array_equal(offsets, expected[1]):
            differing = int(np.argmax(offsets != expected[1])) - 1
            return f"gigatoken differs from tokenizers on torture text {differing}"
        if not np.array_equal(ids, expected[0]):
            differing = int(np.searchsorted(offsets, int(np.argmax(ids != expected[0])), side="right")) - 1
            return f"gigatoken differs from tokenizers on torture text {differing}"
    return engine


def _refuse_reachable_controls(spec: TokenizerSpec, encoded: Encoded) -> None:
    reached = set(np.unique(encoded[0]).tolist()) - {spec.unknown_id}
    names = [name for name, token in spec.control_tokens.items() if token in reached]
    if names:
        raise TokenizerError(
            f"plain text reaches the control tokens {', '.join(names[:8])} in this tokenizer",
            hint="its model vocabulary can produce them; such a vocabulary can't keep raw text apart from controls",
        )


def torture_texts(spec: TokenizerSpec) -> list[bytes]:
    """Texts on which fast engines tend to differ: spaces, digits, contractions, scripts, emoji, added tokens spelt out.

    Every control is spelt alone (where nothing splits text, only a whole text can reach it) and between other text.
    """
    base = [
        "",
        " ",
        "\n",
        "a",
        "Hello world, it's we'll I'D THEY'RE don't.",
        "def f(x):\n    return x ** 2\t# tab\r\n\r\n\r\n        end   \n  \n",
        "1 12 123 1234 12345 3.14159 0xDEADBEEF ١٢٣ ②",
        "naïve café Ångström ß ŒUVRE İstanbul ǅ",
        "汉字测试，中文标点。日本語テキスト　全角スペース 한국어 조합",
        "Привет мир! Ελληνικά עברית العربية हिन्दी ไทย",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u200d\ufeff\u00a0\u2028\u2029 e\u0301",
        "\x01\x02\x1b[31m\x7f \x85 \u061c \u202e",
        "…—–“”‘’«»¿¡§¶†‡•™®©",
        "a" * 300 + " " * 300 + "\n" * 50 + "-" * 300 + "=" * 65,
        "http://example.org/a?b=c&d=%20#frag <html lang='en'>&nbsp;</html>",
        "\U0010ffff\ue000\U0001f9ff𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
        "trailing spaces   ",
        "newline then spaces\n   ",
    ]
    added = [*spec.control_tokens, *spec.kept_tokens]
    spelt = [text for name in added for text in (name, f"x{name}x {name}  {name}{name}\n{name}")]
    return [text.encode() for text in base + spelt]


def engine_versions() -> dict[str, Any]:
    """Versions of both engines, for records (never for digests)."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {}
    for package in ("gigatoken", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
