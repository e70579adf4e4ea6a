"""The one interface to tokenizers: documents in, ids in the store's width out.

`encode` handles plain texts in one native call per batch. `encode_document` handles parts: text between control parts
is encoded as one run, a control part becomes its control token, and a token carries loss if its first byte lies in a
part with loss. Instances may be used by many threads; each thread gets an engine of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import TokenizerError, nearest_first
from penstock.sources import Document, Part, PartKind
from penstock.tokenize.engines import Encoded, Engine, EngineChoice, choose_engine, engine_versions
from penstock.tokenize.framed import FramedEncoder, needs_whole_documents
from penstock.tokenize.specification import TokenizerSpec

__all__ = ["LossRuns", "Tokenizer"]

LossRuns = npt.NDArray[np.uint32]
"""Rows of (first token, number of tokens) that carry loss; None instead where every token does."""

LARGEST_16_BIT_VOCABULARY = 65_535


class Tokenizer:
    """A tokenizer that is ready to encode.

    Args:
        spec: what it is.
        origin: where it came from, for people.
        engine: which engine runs it; chosen by the self-check when None.
    """

    def __init__(self, spec: TokenizerSpec, *, origin: str, engine: EngineChoice | None = None) -> None:
        self.spec = spec
        self.origin = origin
        self._engine_choice = engine
        self._checked_engine: Engine | None = None
        self._threads = threading.local()
        self._choosing = threading.Lock()

    @property
    def engine(self) -> EngineChoice:
        """The engine in use and the reason; the first call runs the self-check."""
        with self._choosing:
            if self._engine_choice is None:
                self._engine_choice, self._checked_engine = choose_engine(self.spec)
            return self._engine_choice

    @property
    def digest(self) -> str:
        """Identity of the ids it gives."""
        return self.spec.digest

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.spec.vocab_size

    @property
    def end_id(self) -> int:
        """The id put after each document."""
        return self.spec.end_id

    @property
    def dtype(self) -> np.dtype[Any]:
        """Width of stored tokens, little-endian."""
        return np.dtype("<u2") if self.vocab_size <= LARGEST_16_BIT_VOCABULARY else np.dtype("<u4")

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Flat ids and borders of plain texts, without anything around them.

        Raises:
            TokenizerError: the engine gave an id beyond the vocabulary or of a control token.
        """
        ids, offsets = self.encode_unchecked(texts)
        self.check(ids)
        return ids, offsets

    def encode_unchecked(self, texts: Sequence[bytes]) -> Encoded:
        """The same for those who `check` each id themselves, when it is in the processor's cache anyway."""
        return self._thread_engine().encode(texts)

    def encode_document(self, document: Document) -> tuple[npt.NDArray[np.uint32], LossRuns | None]:
        """Ids of one document of parts, begin and end tokens included, and the runs that carry loss (None: all)."""
        begin = () if document.framed else self.spec.begin_ids
        ids: list[npt.NDArray[np.uint32]] = [np.array(begin, np.uint32)]
        loss: list[npt.NDArray[np.bool_]] = [np.zeros(len(begin), np.bool_)]
        if document.framed and self._needs_whole_documents:
            self._append_whole(document.parts, ids, loss)
        else:
            self._append_parts(document.parts, ids, loss)
        if not (document.framed and _ends_with(ids, self.end_id)):
            ids.append(np.array([self.end_id], np.uint32))
            loss.append(np.ones(1, np.bool_))
        loss[-1][-1] = True  # when to stop is always learnt
        carries = np.concatenate(loss)
        everything = bool(carries[len(begin) :].all())
        return np.concatenate(ids), None if everything else _runs(carries)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of some ids; bytes that are no UTF-8 (a token cut inside a character) become U+FFFD."""
        numbers = np.asarray(ids).tolist()
        if self.spec.is_byte_level:
            table = self.spec.token_bytes
            return b"".join(table[number] for number in numbers).decode("utf-8", "replace")
        from tokenizers import Tokenizer as Reference

        text: str = Reference.from_str(self.spec.source_json.decode()).decode(numbers, skip_special_tokens=False)
        return text

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """Bytes each id stands for; 0 for controls. Refused where tokens have no exact bytes."""
        return self.spec.token_byte_lengths

    def estimated_byte_lengths(self) -> npt.NDArray[np.int32]:
        """The same of any vocabulary, estimated where tokens have no exact bytes."""
        return self.spec.estimated_byte_lengths

    def describe(self) -> dict[str, Any]:
        """Facts for people and records; only `digest` identifies it."""
        return {
            "origin": self.origin,
            "digest": self.digest,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype.str,
            "end_id": self.end_id,
            "begin_ids": list(self.spec.begin_ids),
            "byte_exact": self.spec.keeps_bytes,
            "control_tokens": self.spec.control_tokens,
            "kept_tokens": self.spec.kept_tokens,
        }

    def describe_engine(self) -> dict[str, Any]:
        """Which engine encodes, why, and its version; no part of any digest."""
        return {"engine": self.engine.name, "reason": self.engine.reason, "versions": engine_versions()}

    def _thread_engine(self) -> Engine:
        engine: Engine | None = getattr(self._threads, "engine", None)
        if engine is None:
            choice = self.engine
            with self._choosing:  # the engine of the self-check serves the first thread that comes
                engine, self._checked_engine = self._checked_engine, None
            engine = self._threads.engine = engine or choice.build(self.spec)
        return engine

    def check(self, ids: npt.NDArray[np.uint32]) -> None:
        """Refuses ids that no text has. One pass at memory speed.

        Raises:
            TokenizerError: there is one beyond the vocabulary or of a control token.
        """
        # Control tokens usually lie above all others, so this guards them as well.
        if ids.size and int(ids.max()) > self.spec.highest_text_id:
            raise TokenizerError(
                f"the engine gave id {int(ids.max())}, text ends at id {self.spec.highest_text_id} in this vocabulary",
                hint="the tokenizer file is inconsistent; nothing was stored",
            )

    def _control_id(self, name: bytes) -> int:
        text = name.decode()
        if text not in self.spec.control_tokens:
            raise TokenizerError(
                f"the template needs the control token {text!r}, which this tokenizer doesn't have",
                hint=f"it has: {nearest_first(text, self.spec.control_tokens)}",
            )
        return self.spec.control_tokens[text]

    @cached_property
    def _needs_whole_documents(self) -> bool:
        return needs_whole_documents(self.spec)

    @cached_property
    def _framed_encoder(self) -> FramedEncoder:
        return FramedEncoder(self.spec)

    def _append_whole(
        self, parts: Sequence[Part], ids: list[npt.NDArray[np.uint32]], loss: list[npt.NDArray[np.bool_]]
    ) -> None:
        """Encodes a framed document at once, where text between controls isn't an island."""
        for part in parts:
            if part.kind is PartKind.CONTROL:
                self._control_id(part.data)  # refuses an unknown one
        whole_ids, carries = self._framed_encoder.encode(parts)
        self.check(whole_ids[~np.isin(whole_ids, list(self.spec.control_tokens.values()))])
        ids.append(whole_ids)
        loss.append(carries)

    def _append_parts(
        self, parts: Sequence[Part], ids: list[npt.NDArray[np.uint32]], loss: list[npt.NDArray[np.bool_]]
    ) -> None:
        run: list[Part] = []
        for part in parts:
            if part.kind is PartKind.TEXT:
                run.append(part)
                continue
            self._append_run(run, ids, loss)
            run = []
            ids.append(np.array([self._control_id(part.data)], np.uint32))
            loss.append(np.array([part.loss]))
        self._append_run(run, ids, loss)

    def _append_run(
        self, run: list[Part], ids: list[npt.NDArray[np.uint32]], loss: list[npt.NDArray[np.bool_]]
    ) -> None:
        """Encodes adjoining text parts as one text and finds, by first bytes, which tokens carry loss."""
        run = [part for part in run if part.data]
        if not run:
            return
        run_ids, _ = self.encode([b"".join(part.data for part in run)])
        ids.append(run_ids)
        if all(part.loss == run[0].loss for part in run):
            loss.append(np.full(run_ids.size, run[0].loss))
            return
        if not self.spec.keeps_bytes:
            raise TokenizerError(
                "loss on some parts of a text needs a byte-level tokenizer without a normalizer",
                hint="put a control token between the parts, or use a byte-level tokenizer",
            )
        lengths = self.spec.token_byte_lengths[run_ids]
        first_byte = np.cumsum(lengths) - lengths
        part_ends = np.cumsum([len(part.data) for part in run])
        carries = np.array([part.loss for part in run])
        loss.append(carries[np.searchsorted(part_ends, first_byte, side="right")])


def _ends_with(ids: list[npt.NDArray[np.uint32]], end_id: int) -> bool:
    return bool(ids[-1].size) and int(ids[-1][-1]) == end_id


def _runs(carries: npt.NDArray[np.bool_]) -> LossRuns:
    """Boolean per token to rows of (first, count)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], carries, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return np.stack([starts, ends - starts], axis=1).astype(np.uint32)
