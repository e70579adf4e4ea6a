"""A SentencePiece `.model` file to a tokenizer.json, without the sentencepiece package.

In: the bytes of a model of kind Unigram or BPE. Out: a tokenizer.json that gives the same ids: the model's own
precompiled character map, removal of extra spaces, dummy prefix, byte fallback, and its control and user-defined pieces
as added tokens. The file is a protobuf message of which a dozen fields matter, so they are read here. Costs about a
second per 30,000 BPE pieces, for finding their merges.

Four differences are known, all rare. Where two splits of one piece overlap (`aa|a|aa`), SentencePiece merges the
leftmost, BPE the better ranked. Two Unigram paths of equal score (`0|00` and `00|0`) tie by rounding, in 32 bits there,
in 64 here. Text after a user-defined piece gets the dummy prefix here, and loses spaces, as if it began there. Where a
character that the map replaces has combining marks or joiners, `tokenizers` drops those with it.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from penstock.errors import TokenizerError

__all__ = ["SentencePieceModel", "sentencepiece_json"]

SPACE = "▁"

# Field numbers of sentencepiece_model.proto, by message.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SUFFIX_SPACE, _BYTE_FALLBACK, _UNK_PIECE, _BOS_PIECE, _EOS_PIECE = 3, 24, 35, 45, 46, 47
_CHARS_MAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5


class _Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_UNIGRAM, _BPE = 1, 2
_MODEL_NAMES = {_UNIGRAM: "unigram", _BPE: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """What is read of a model: its pieces (text, score, kind), and how text is prepared for them."""

    pieces: list[tuple[str, float, int]]
    is_bpe: bool
    byte_fallback: bool
    chars_map: bytes
    dummy_prefix: bool
    remove_extra_spaces: bool
    begin_piece: str
    end_piece: str

    @classmethod
    def from_bytes(cls, data: bytes, *, origin: str) -> SentencePieceModel:
        """Reads a `.model` file.

        Raises:
            TokenizerError: it is none, it is damaged, or of a kind that no tokenizer.json can express.
        """
        try:
            return cls._read(data)
        except _RefusedError as error:
            raise TokenizerError(f"{origin}: {error}", hint="give the tokenizer.json of that tokenizer") from None
        except (ValueError, IndexError, struct.error, TypeError) as error:
            raise TokenizerError(
                f"{origin} isn't a SentencePiece model: {error}",
                hint="give a .model file written by SentencePiece; a rank file of tiktoken must be named .tiktoken",
            ) from None

    @classmethod
    def _read(cls, data: bytes) -> SentencePieceModel:
        pieces: list[tuple[str, float, int]] = []
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(data):
            if number == _PIECES:
                pieces.append(_piece(value))
            elif number == _TRAINER:
                trainer = dict(_fields(value))
            elif number == _NORMALIZER:
                normalizer = dict(_fields(value))
        if not pieces or not trainer:
            raise ValueError("it holds no pieces" if not pieces else "it doesn't say how it was trained")
        kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
        if kind not in (_UNIGRAM, _BPE):
            raise _RefusedError(f"models of kind {_MODEL_NAMES.get(kind, kind)!r} have no tokenizer.json form")
        if trainer.get(_SUFFIX_SPACE, 0) or not normalizer.get(_ESCAPE_SPACES, 1):
            raise _RefusedError("models that put the space after a word, or don't mark it, have no tokenizer.json form")
        return cls(
            pieces=pieces,
            is_bpe=kind == _BPE,
            byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
            chars_map=bytes(normalizer.get(_CHARS_MAP, b"")),
            dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
            remove_extra_spaces=bool(normalizer.get(_REMOVE_SPACES, 1)),
            begin_piece=bytes(trainer.get(_BOS_PIECE, b"<s>")).decode(),
            end_piece=bytes(trainer.get(_EOS_PIECE, b"</s>")).decode(),
        )

    @property
    def control_pieces(self) -> dict[str, int]:
        """Name -> id of the pieces that stand for no text."""
        return {piece: number for number, (piece, _, kind) in enumerate(self.pieces) if kind == _Kind.CONTROL}


class _RefusedError(Exception):
    """A sound model that can't be expressed."""


def sentencepiece_json(model: SentencePieceModel, *, begin: bool = False, end: bool = False) -> bytes:
    """The model as a tokenizer.json; `begin` and `end` say whether its control pieces go around a text."""
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": _normalizer(model),
        "pre_tokenizer": _pre_tokenizer(model),
        "post_processor": _post_processor(model, begin=begin, end=end),
        "decoder": _decoder(model),
        "model": _bpe(model) if model.is_bpe else _unigram(model),
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _added_tokens(model: SentencePieceModel) -> list[dict[str, Any]]:
    """Controls are special, user-defined pieces are kept: they are taken whole wherever text has them."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": piece, **flags, "special": kind != _Kind.USER_DEFINED}
        for number, (piece, _, kind) in enumerate(model.pieces)
        if kind in (_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN)
    ]


def _normalizer(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.chars_map:
        chars_map = base64.b64encode(model.chars_map).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": chars_map})
    if model.remove_extra_spaces:
        # Only the space and its mark: `Strip` would take every kind of white space, which SentencePiece keeps.
        steps.append({"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE}]+\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _pre_tokenizer(model: SentencePieceModel) -> dict[str, Any] | None:
    """Unigram pieces that never hold a ▁ inside are looked for word by word, which is faster and gives the same."""
    if model.is_bpe or any(SPACE in piece[1:] for piece, _, _ in model.pieces):
        return None
    return {"type": "Split", "pattern": {"String": SPACE}, "behavior": "MergedWithNext", "invert": False}


def _post_processor(model: SentencePieceModel, *, begin: bool, end: bool) -> dict[str, Any] | None:
    controls = model.control_pieces
    before = [model.begin_piece] if begin and model.begin_piece in controls else []
    after = [model.end_piece] if end and model.end_piece in controls else []
    if not before and not after:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(name: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": name, "type_id": type_id}}

        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*map(special, before), text, *map(special, after)]

    special_tokens = {name: {"id": name, "ids": [controls[name]], "tokens": [name]} for name in [*before, *after]}
    pair = [*around("A", 0), *around("B", 1)]
    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": special_tokens}


def _decoder(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    if model.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    unknown = next((number for number, (_, _, kind) in enumerate(model.pieces) if kind == _Kind.UNKNOWN), None)
    # A byte piece is what stands for a byte, never what spells its name: worse than any spelling of it by others.
    worst = 10 * min((score for _, score, kind in model.pieces if kind == _Kind.NORMAL), default=-1.0)
    pieces = [[piece, worst if kind == _Kind.BYTE else score] for piece, score, kind in model.pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": model.byte_fallback}


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    unknown = next((piece for piece, _, kind in model.pieces if kind == _Kind.UNKNOWN), None)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece: number for number, (piece, _, _) in enumerate(model.pieces)},
        "merges": _merges(model),
    }


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score first: SentencePiece merges whatever makes a known piece.

    Controls, bytes and the unknown piece are no text, so nothing merges into them.
    """
    ids = {
        piece: number
        for number, (piece, _, kind) in enumerate(model.pieces)
        if kind in (_Kind.NORMAL, _Kind.USER_DEFINED)
    }
    merges: list[tuple[float, int, int, int, str, str]] = []
    for piece, number in ids.items():
        score = model.pieces[number][1]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, number, ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(_SCORE, b"\0\0\0\0"))
    return bytes(fields[_PIECE]).decode() if _PIECE in fields else "", score, int(fields.get(_TYPE, _Kind.NORMAL))


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message: integers, or bytes for everything else."""
    if not isinstance(data, bytes):
        raise TypeError("a number where a message belongs")
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"a field of {length} bytes at byte {position}, of {len(data)}")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError(f"a number that doesn't end at byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
