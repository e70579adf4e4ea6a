"""Documents of parts through `tokenizers` itself, for vocabularies where a run of text isn't an island.

In most byte-level vocabularies the text between two control tokens can be encoded on its own. Elsewhere it can't: a
SentencePiece-like vocabulary puts a space before the first run only, a control token may take the spaces beside it
(`lstrip`, `rstrip`), a normalizer may see both sides. There the whole document goes through `tokenizers` at once, with
a stand-in for each control token: a private-use character that the document doesn't contain, with the flags of the real
one. So content can't spell a control, and the ids are those that `tokenizers` gives for the real ones.

Costs what `tokenizers` costs (about 1 MB/s), and one load of the vocabulary; only framed documents come here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import TokenizerError
from penstock.sources import Part, PartKind
from penstock.tokenize.specification import TokenizerSpec
from penstock.tokenize.vanishing import refuse_vanishing_tokens

__all__ = ["FramedEncoder", "needs_whole_documents"]

FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0x10FFFD
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def needs_whole_documents(spec: TokenizerSpec) -> bool:
    """Whether text between control tokens can't be encoded on its own."""
    flags = ("single_word", "lstrip", "rstrip")
    return not spec.keeps_bytes or any(token.get(flag) for token in _added(spec).values() for flag in flags)


def _added(spec: TokenizerSpec) -> dict[str, dict[str, Any]]:
    """The control tokens among the added tokens, as the file has them."""
    added = json.loads(spec.source_json).get("added_tokens") or []
    return {token["content"]: token for token in added if token["content"] in spec.control_tokens}


class FramedEncoder:
    """Encodes documents of parts as wholes. May be used by many threads."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._usual = _StandIns(spec, frozenset())

    def encode(self, parts: Sequence[Part]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Ids, and which of them carry loss.

        Raises:
            TokenizerError: a control token isn't in the vocabulary, or the ids don't show those that were put in.
        """
        texts = b"".join(part.data for part in parts if part.kind is PartKind.TEXT).decode()
        clash = self._usual.characters.intersection(texts)
        stand_ins = _StandIns(self._spec, frozenset(texts)) if clash else self._usual
        return stand_ins.encode(parts)


class _StandIns:
    """A vocabulary in which each control token is spelt with one character."""

    def __init__(self, spec: TokenizerSpec, avoided: frozenset[str]) -> None:
        self._spec = spec
        free = (chr(n) for n in range(FIRST_STAND_IN, LAST_STAND_IN + 1) if chr(n) not in avoided)
        self._of_name = dict(zip(spec.control_tokens, free, strict=False))
        self.characters = frozenset(self._of_name.values())
        # Flags are kept, so that a stand-in behaves as the token does. Where a normalizer wouldn't let it through, it
        # is found before the normalizer.
        self._tokenizer = self._load(frozenset())
        lost = [name for name, standin in self._of_name.items() if not self._is_found(standin)]
        if lost:
            self._tokenizer = self._load(frozenset(lost))
        # Only now: stand-ins that vanish were among the lost. Until here each was alone in its text, which always ends.
        refuse_vanishing_tokens(self._tokenizer)
        self._controls, self._true_ids = self._renumbering()

    def _load(self, not_normalized: frozenset[str]) -> Any:
        from tokenizers import Tokenizer

        added = _added(self._spec)
        tokens = []
        for name, standin in self._of_name.items():
            token = {**FLAGS, **added.get(name, {}), "id": self._spec.control_tokens[name], "content": standin}
            tokens.append({**token, "normalized": False} if name in not_normalized else token)
        content = {**self._spec.encoder, "added_tokens": [*self._spec.encoder["added_tokens"], *tokens]}
        content["added_tokens"].sort(key=lambda token: token["id"])
        return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))

    def _is_found(self, standin: str) -> bool:
        return self._tokenizer.token_to_id(standin) in self._tokenizer.encode(standin, add_special_tokens=False).ids

    def _renumbering(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
        """By the id that `tokenizers` gives: whether it is a stand-in, and the id that is meant."""
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        controls, true_ids = np.zeros(highest + 1, np.bool_), np.arange(highest + 1, dtype=np.uint32)
        for name, meant in self._spec.kept_tokens.items():
            true_ids[self._tokenizer.token_to_id(name)] = meant
        for name, standin in self._of_name.items():
            given = self._tokenizer.token_to_id(standin)
            controls[given], true_ids[given] = True, self._spec.control_tokens[name]
        return controls, true_ids

    def encode(self, parts: Sequence[Part]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """See `FramedEncoder.encode`."""
        controls = [part for part in parts if part.kind is PartKind.CONTROL]
        data = b"".join(
            self._of_name[part.data.decode()].encode() if part.kind is PartKind.CONTROL else part.data for part in parts
        )
        encoding = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        given = np.array(encoding.ids, np.int64)
        is_control = self._controls[given]
        ids = self._true_ids[given]
        expected = [self._spec.control_tokens[part.data.decode()] for part in controls]
        if ids[is_control].tolist() != expected or self._reached(ids[~is_control]):
            raise TokenizerError(
                "the ids of a document don't show the control tokens that were put in",
                hint="the tokenizer file is inconsistent; nothing was stored",
            )
        loss = self._loss_of_characters(parts, data)
        first = np.array([start for start, _ in encoding.offsets], np.int64)
        carries = loss[np.minimum(first, max(loss.size - 1, 0))] if loss.size else np.zeros(0, np.bool_)
        carries[is_control] = [part.loss for part in controls]  # `lstrip` makes a control begin before itself
        return ids, carries

    def _reached(self, ids: npt.NDArray[np.uint32]) -> bool:
        """Whether text became a control token, the unknown one apart."""
        controls = set(self._spec.control_tokens.values()) - {self._spec.unknown_id}
        return bool(np.isin(ids, list(controls)).any())

    def _loss_of_characters(self, parts: Sequence[Part], data: bytes) -> npt.NDArray[np.bool_]:
        lengths = [
            len(self._of_name[part.data.decode()].encode()) if part.kind is PartKind.CONTROL else len(part.data)
            for part in parts
        ]
        of_bytes = np.repeat(np.array([part.loss for part in parts], np.bool_), lengths)
        begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
        of_characters: npt.NDArray[np.bool_] = of_bytes[begins]
        return of_characters
