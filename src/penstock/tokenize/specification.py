"""What a tokenizer is, apart from the engine that runs it.

In: the content of a tokenizer.json. Out: the encoder (the same JSON without the tokens that text must not reach), the
control tokens by name, the ids put around each document, each token's bytes, and the digest of all that.

Raw text is ordinary text: added tokens that are special, or look like controls, are taken out of the encoder, so that a
file that spells `<|endoftext|>` gets the tokens of those characters. Ordinary added tokens (runs of spaces, say) stay.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from penstock.errors import TokenizerError
from penstock.hashing import digest_of, strong_hash

__all__ = ["TokenizerSpec", "byte_of_character", "character_of_byte"]

END_TOKEN_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_LOOKS_LIKE_FLOAT = re.compile(rb"[:,\[]-?[0-9]+[.eE]")
_CONTROL_LIKE = re.compile(
    r"<\|.*\|>|<｜.*｜>|\[/?[A-Z][A-Z_0-9]*\]"
    r"|</?(s|bos|eos|pad|unk|mask|cls|sep|think|tool_call|tool_response|fim[_-]\w+|repo_?name|file_?sep|gh_stars"
    r"|issue_\w+|jupyter_\w+|commit_\w+|empty_output|start_of_\w+|end_of_\w+|unused\d+|reserved\w*)>"
)


def _byte_level_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: visible Latin-1 characters stand for themselves, the rest move up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in visible}
    moved = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(256 + number) for number, byte in enumerate(moved)})
    return [alphabet[byte] for byte in range(256)]


character_of_byte = _byte_level_alphabet()
byte_of_character = {character: byte for byte, character in enumerate(character_of_byte)}


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer as data; equal digests mean equal tokens for every text.

    Attributes:
        source_json: the tokenizer.json as it came; copied into the store.
        encoder: what engines load: control tokens, post-processing, padding and truncation removed.
        control_tokens: name -> id of every token that text can't reach.
        kept_tokens: name -> id of the added tokens that text can reach.
        begin_ids: ids put before each document, because the tokenizer itself does so.
        end_id: id put after each document.
        vocab_size: one more than the largest id.
    """

    source_json: bytes
    encoder: dict[str, Any]
    control_tokens: dict[str, int]
    kept_tokens: dict[str, int]
    begin_ids: tuple[int, ...]
    end_id: int
    vocab_size: int

    @classmethod
    def from_json(cls, source_json: bytes, *, origin: str, end_token: str | None = None) -> TokenizerSpec:
        """Reads a tokenizer.json.

        Args:
            source_json: its content.
            origin: where it came from, for messages.
            end_token: name of the token put after each document; found by itself when None.
        """
        content = _parsed(source_json, origin)
        added = content.get("added_tokens") or []
        control = {token["content"]: token["id"] for token in added if _is_control(token)}
        known = {**_vocabulary(content), **{token["content"]: token["id"] for token in added}}
        prefix, suffix = _wrapping(content, origin)
        end_id = _end_id(control, known, suffix, end_token, origin)
        # What is put around documents is a control, whatever the file says: text must not be able to spell it.
        around = {*prefix, end_id}
        control |= {name: token for name, token in known.items() if token in around}
        kept = [token for token in added if token["content"] not in control]
        encoder = {**content, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
        return cls(
            source_json=source_json,
            encoder=_with_unreachable_pieces(encoder, control),
            control_tokens=control,
            kept_tokens={token["content"]: token["id"] for token in kept},
            begin_ids=prefix,
            end_id=end_id,
            vocab_size=1 + max(known.values()),
        )

    @cached_property
    def encoder_json(self) -> str:
        """The encoder as text, for engines."""
        try:
            return orjson.dumps(self.encoder).decode()  # a tenth of what `json` takes
        except TypeError:  # it takes neither half surrogate pairs nor integers of more than 64 bits
            return json.dumps(self.encoder, ensure_ascii=False)

    @cached_property
    def digest(self) -> str:
        """Strong hash of everything that decides which ids a document gets."""
        meaning = {key: value for key, value in self.encoder.items() if key != "decoder"}
        around = {"control": self.control_tokens, "begin": list(self.begin_ids), "end": self.end_id}
        return _digest({"encoder": meaning, **around})

    @cached_property
    def highest_text_id(self) -> int:
        """The largest id that text may become."""
        controls = set(self.control_tokens.values()) - {self.unknown_id}
        return max(
            token
            for token in [*_vocabulary(self.encoder).values(), *self.kept_tokens.values()]
            if token not in controls
        )

    @property
    def unknown_id(self) -> int | None:
        """The id that the model itself gives to what it doesn't know: the one control that text does reach."""
        model = self.encoder["model"]
        if model.get("unk_token") is not None:
            return _vocabulary(self.encoder).get(model["unk_token"])
        unknown: int | None = model.get("unk_id")
        return unknown

    @property
    def pre_tokenizer_steps(self) -> list[dict[str, Any]]:
        """What cuts text up, step by step."""
        return _components(self.encoder.get("pre_tokenizer"))

    @property
    def normalizer_steps(self) -> list[dict[str, Any]]:
        """What changes text before it is cut up, step by step."""
        return _components(self.encoder.get("normalizer"))

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens stand for exact bytes (GPT-2's alphabet)."""
        return "ByteLevel" in _component_types(self.encoder.get("pre_tokenizer"))

    @property
    def keeps_bytes(self) -> bool:
        """Whether a document's token bytes, joined, are the document's bytes, for every document."""
        model = self.encoder["model"]
        return (
            self.is_byte_level
            and self.encoder.get("normalizer") is None
            and all(map(_keeps_text, self.pre_tokenizer_steps))
            and not any(token.get("lstrip") or token.get("rstrip") for token in self.encoder["added_tokens"])
            and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
            and all(character in model["vocab"] for character in character_of_byte)
        )

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each id; control tokens give their name. Only byte-level vocabularies have it."""
        if not self.is_byte_level:
            raise TokenizerError(
                "this vocabulary isn't byte-level, so single tokens have no exact bytes",
                hint="use a byte-level BPE tokenizer for byte-exact provenance",
            )
        table = [b""] * self.vocab_size
        for text, token in _vocabulary(self.encoder).items():
            table[token] = bytes(byte_of_character[character] for character in text if character in byte_of_character)
        for text, token in {**self.kept_tokens, **self.control_tokens}.items():
            table[token] = text.encode()
        return table

    @cached_property
    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """Bytes that each id stands for in a document; 0 for control tokens, which stand for none."""
        lengths = np.fromiter((len(data) for data in self.token_bytes), dtype=np.int32, count=self.vocab_size)
        lengths[[*self.control_tokens.values(), self.end_id, *self.begin_ids]] = 0
        return lengths

    @cached_property
    def estimated_byte_lengths(self) -> npt.NDArray[np.int32]:
        """`token_byte_lengths`, of any vocabulary: where tokens have no exact bytes, those of their text.

        What a normalizer changed or a decoder adds isn't in it, so figures made with it are estimates.
        """
        if self.is_byte_level:
            return self.token_byte_lengths
        lengths = np.zeros(self.vocab_size, np.int32)
        for text, token in {**_vocabulary(self.encoder), **self.kept_tokens}.items():
            lengths[token] = 1 if _BYTE_TOKEN.fullmatch(text) else len(_shown(text).encode())
        lengths[[*self.control_tokens.values(), self.end_id, *self.begin_ids]] = 0
        return lengths


def _shown(token: str) -> str:
    """The text of a token without the marks of SentencePiece and WordPiece."""
    return token.removeprefix("##").replace("\u2581", " ")


def _digest(value: Any) -> str:
    """`digest_of`, in a tenth of the time where the value holds no floats, which the two libraries may spell apart."""
    try:
        quick = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return digest_of(value)
    return digest_of(value) if _LOOKS_LIKE_FLOAT.search(quick) else strong_hash(quick).hex()


def _parsed(source_json: bytes, origin: str) -> dict[str, Any]:
    hint = "give a tokenizer.json as `tokenizers` writes it, a folder that holds one, or a .tiktoken file"
    try:
        content: dict[str, Any] = json.loads(source_json)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{origin} isn't a tokenizer: no JSON ({error})", hint=hint) from None
    if not _has_the_shape(content):
        raise TokenizerError(f"{origin} isn't a tokenizer: JSON without a model and its vocabulary", hint=hint)
    if content["model"].get("dropout"):
        raise TokenizerError(
            f"{origin} drops merges at random (model.dropout {content['model']['dropout']}); the same text must always"
            " give the same ids",
            hint="set model.dropout to null in that file",
        )
    return content


def _has_the_shape(content: Any) -> bool:
    """Whether the fields that are read here are of the right kind; the engines check the rest."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return False
    vocabulary, added = content["model"].get("vocab"), content.get("added_tokens") or []
    if isinstance(vocabulary, dict):
        has_vocabulary = all(type(token) is int and token >= 0 for token in vocabulary.values())
    else:
        has_vocabulary = isinstance(vocabulary, list) and all(
            isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocabulary
        )
    return (
        has_vocabulary
        and all(
            isinstance(content.get(name), dict | None) for name in ("normalizer", "pre_tokenizer", "post_processor")
        )
        and isinstance(added, list)
        and all(
            isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
            for token in added
        )
    )


def _is_control(token: dict[str, Any]) -> bool:
    return bool(token.get("special")) or _CONTROL_LIKE.fullmatch(token["content"]) is not None


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {entry[0]: number for number, entry in enumerate(vocabulary)}  # Unigram: a list of [piece, score]


def _with_unreachable_pieces(encoder: dict[str, Any], control: dict[str, int]) -> dict[str, Any]:
    """The encoder with Unigram's control pieces respelt with a space, which no text it sees has.

    A Unigram model finds its pieces wherever text spells them, `</s>` too (T5's and every other SentencePiece model
    has it among its pieces). Where spaces are replaced or cut out before the model, a piece with one is never found.
    """
    if encoder["model"].get("type") != "Unigram" or not _hides_spaces(encoder):
        return encoder
    pieces = [[f" {piece}" if piece in control else piece, *rest] for piece, *rest in encoder["model"]["vocab"]]
    return {**encoder, "model": {**encoder["model"], "vocab": pieces}}


def _hides_spaces(encoder: dict[str, Any]) -> bool:
    """Whether no space reaches the model, in any text."""
    cutters = {"Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
    replaced = any(
        step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and " " not in step.get("content", " ")
        for step in _components(encoder.get("normalizer"))[-1:]
    )
    return replaced or not cutters.isdisjoint(_component_types(encoder.get("pre_tokenizer")))


def _components(part: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the flat list of its members."""
    if not isinstance(part, dict):
        return []
    members = part.get("pretokenizers") or part.get("normalizers")
    return [inner for member in members for inner in _components(member)] if members else [part]


def _component_types(part: Any) -> set[str | None]:
    return {component.get("type") for component in _components(part)}


def _keeps_text(component: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer only cuts text, adding and removing nothing."""
    if component.get("type") == "ByteLevel":
        return not component.get("add_prefix_space")
    return component.get("type") in ("Split", "Digits", "Punctuation") and component.get("behavior") != "Removed"


def _wrapping(content: dict[str, Any], origin: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer's own post-processor puts before and after a text."""
    processor = content.get("post_processor")
    if processor is None or processor.get("type") == "ByteLevel":
        return (), ()
    from tokenizers import Tokenizer

    # What is put around a text doesn't depend on its added tokens, and looking for normalized ones may never end (see
    # `vanishing`).
    added = [{**token, "normalized": False} for token in content.get("added_tokens") or []]
    try:
        tokenizer = Tokenizer.from_str(json.dumps({**content, "added_tokens": added}, ensure_ascii=False))
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        wrapped = tokenizer.encode("a", add_special_tokens=True).ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  it raises bare Exception, or panics, over whatever it can't use
        raise TokenizerError(
            f"{origin} can't be loaded as a tokenizer: {error}", hint="check it with tokenizers.Tokenizer.from_file"
        ) from None
    for start in range(len(wrapped) - len(plain) + 1):
        if wrapped[start : start + len(plain)] == plain:
            return tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :])
    return (), ()


def _end_id(
    control: dict[str, int], known: dict[str, int], suffix: tuple[int, ...], wanted: str | None, origin: str
) -> int:
    if wanted is not None:
        if wanted not in known:
            raise TokenizerError(
                f"{origin} has no token {wanted!r}",
                hint=f"its control tokens: {', '.join(sorted(control)) or 'none'}",
            )
        return known[wanted]
    if suffix:
        return suffix[0]
    for name in END_TOKEN_NAMES:
        if name in known:
            return known[name]
    raise TokenizerError(
        f"{origin} has no end-of-document token that is known by name",
        hint=f"name it with --end-token; control tokens: {', '.join(sorted(control)) or 'none'}",
    )
