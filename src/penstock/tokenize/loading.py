"""A `--tokenizer` value to a Tokenizer: a tokenizer.json, a folder, a .tiktoken, a SentencePiece model, or a hub id.

What a value is gets decided by looking: a path that exists is that path, whatever it is called; anything else that can
be an id of the Hugging Face hub is one (see `hub`). Folders without a tokenizer.json are read by `folders`.

Rank files hold no split pattern and no control tokens; both are known for the published names. They become a
tokenizer.json, so that one format is stored and one digest is defined. Costs about a second per 100,000 ranks.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import TokenizerError, nearest_first
from penstock.tokenize.folders import folder_json
from penstock.tokenize.hub import hub_folder, is_hub_id
from penstock.tokenize.sentencepiece import SentencePieceModel, sentencepiece_json
from penstock.tokenize.specification import TokenizerSpec, character_of_byte
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["byte_level_json", "load_tokenizer"]

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@dataclass(frozen=True, kw_only=True)
class _Encoding:
    """What a rank file doesn't say: how text is split, the control tokens, and how long it is when whole."""

    num_ranks: int
    pattern: str
    control_tokens: dict[str, int]


# Published by OpenAI with tiktoken (tiktoken_ext/openai_public.py).
ENCODINGS = {
    "r50k_base": _Encoding(num_ranks=50_256, pattern=GPT2_PATTERN, control_tokens={"<|endoftext|>": 50256}),
    "cl100k_base": _Encoding(
        num_ranks=100_256,
        pattern=CL100K_PATTERN,
        control_tokens={
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": _Encoding(
        num_ranks=199_998,
        pattern=O200K_PATTERN,
        control_tokens={"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    ),
}


def load_tokenizer(value: str, *, end_token: str | None = None, network: bool = False) -> Tokenizer:
    """Loads a tokenizer from a path or by its id on the Hugging Face hub.

    Args:
        value: a tokenizer.json, a folder, a .tiktoken or .model file, or a hub id such as `gpt2`.
        end_token: name of the token put after each document; found by itself when None.
        network: whether a hub id that isn't on this disk may be downloaded.

    Raises:
        TokenizerError: nothing is there, or it isn't a tokenizer.
    """
    path = Path(value)
    if path.is_dir():
        source, named_end = folder_json(path)
    elif path.is_file():
        source, named_end = _file_json(path)
    elif is_hub_id(value):
        source, named_end = folder_json(hub_folder(value, network=network))
    else:
        raise TokenizerError(
            f"tokenizer {value!r} is neither a file nor a folder"
            if path.exists()
            else f"tokenizer {value!r} doesn't exist",
            hint="give a tokenizer.json, a folder that holds one, a .tiktoken or SentencePiece .model file, or a hub id"
            " such as gpt2; without one, one is trained",
        )
    spec = TokenizerSpec.from_json(source, origin=value, end_token=end_token or named_end)
    return Tokenizer(spec, origin=value)


def _file_json(path: Path) -> tuple[bytes, str | None]:
    """The tokenizer.json of a file, and the end token that it names."""
    if path.suffix == ".tiktoken":
        return _tiktoken_to_json(path), None
    if path.suffix == ".model":
        model = SentencePieceModel.from_bytes(path.read_bytes(), origin=str(path))
        return sentencepiece_json(model), model.end_piece
    return path.read_bytes(), None


def _tiktoken_to_json(path: Path) -> bytes:
    encoding = ENCODINGS.get(path.stem)
    if encoding is None:
        raise TokenizerError(
            f"{path.name}: a rank file doesn't say how text is split, and this name isn't known",
            hint=f"known names: {nearest_first(path.stem, ENCODINGS)}; otherwise give a tokenizer.json",
        )
    ranks = _read_ranks(path, num_ranks=encoding.num_ranks)
    vocabulary = {_spelling(token): rank for token, rank in ranks.items()}
    return byte_level_json(vocabulary, _merges(ranks), encoding.control_tokens, pattern=encoding.pattern)


def _read_ranks(path: Path, *, num_ranks: int) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{path.name} line {number} isn't `base64 rank`: {line[:40]!r}",
                hint="get the file again; it is damaged",
            ) from None
    if sorted(ranks.values()) != list(range(num_ranks)):  # a file cut short still has well-formed lines
        raise TokenizerError(
            f"{path.name} doesn't hold the ranks 0 to {num_ranks - 1}, each once: {len(ranks)} tokens were read",
            hint="get the file again; it is damaged or another vocabulary of that name",
        )
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every split of a token into two known ones, by the token's rank: tiktoken merges any pair that makes a token."""
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()
    return [(_spelling(left), _spelling(right)) for *_, left, right in merges]


def _spelling(token: bytes) -> str:
    return "".join(character_of_byte[byte] for byte in token)


def byte_level_json(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], control_tokens: dict[str, int], *, pattern: str
) -> bytes:
    """A tokenizer.json for a byte-level BPE vocabulary spelt in GPT-2's alphabet."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if pattern == GPT2_PATTERN:
        splitter: dict[str, Any] = {**byte_level, "use_regex": True}  # its built-in pattern is this one
    else:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        splitter = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": name, **flags} for name, token in control_tokens.items()],
        "normalizer": None,
        "pre_tokenizer": splitter,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False).encode()
