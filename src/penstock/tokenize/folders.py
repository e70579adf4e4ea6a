"""Folders as tokenizers are published: what lies in them to one tokenizer.json, and its end token.

In order of preference: tokenizer.json; vocab.json with merges.txt (GPT-2, RoBERTa, CodeBERT); vocab.txt (BERT);
spiece.model or tokenizer.model (SentencePiece). tokenizer_config.json, where there is one, says the end token and the
options that the bare vocabularies leave open; without it the published defaults of the family hold. Nothing is
executed: code and pickles in such folders are never looked at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import TokenizerError
from penstock.tokenize.sentencepiece import SentencePieceModel, sentencepiece_json

__all__ = ["TOKENIZER_FILES", "folder_json", "holds_tokenizer"]

SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    *SENTENCEPIECE_FILES,
)
"""All that is ever read of a folder or asked of a hub."""

ROBERTA_CONTROLS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT_CONTROLS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has enough to make a tokenizer of."""
    names = {name for name in TOKENIZER_FILES if (folder / name).is_file()}
    has_merges = {"vocab.json", "merges.txt"} <= names
    return has_merges or not names.isdisjoint({"tokenizer.json", "vocab.txt", *SENTENCEPIECE_FILES})


def folder_json(folder: Path) -> tuple[bytes, str | None]:
    """The tokenizer.json of a folder, as it lies there or made of what does, and the end token that it names.

    Raises:
        TokenizerError: the folder holds no tokenizer, or one that can't be read.
    """
    config = _object(folder / "tokenizer_config.json")
    end_token = _token_name(config.get("eos_token"))
    if (folder / "tokenizer.json").is_file():
        return (folder / "tokenizer.json").read_bytes(), end_token
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _merges_folder(folder, config), end_token
    if (folder / "vocab.txt").is_file():
        return _word_piece_folder(folder, config), end_token
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file():
            model = SentencePieceModel.from_bytes((folder / name).read_bytes(), origin=str(folder / name))
            return _sentencepiece_folder(model, config), end_token or model.end_piece
    raise TokenizerError(
        f"folder {str(folder)!r} holds no tokenizer.json, vocab.json with merges.txt, vocab.txt or spiece.model",
        hint="save it there with `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`",
    )


def _sentencepiece_folder(model: SentencePieceModel, config: dict[str, Any]) -> bytes:
    # Llama's class adds its begin token where the file doesn't say otherwise; others add none.
    is_llama = str(config.get("tokenizer_class", "")).startswith("Llama")
    begin = bool(config.get("add_bos_token", is_llama))
    return sentencepiece_json(model, begin=begin, end=bool(config.get("add_eos_token", False)))


def _merges_folder(folder: Path, config: dict[str, Any]) -> bytes:
    """vocab.json and merges.txt; RoBERTa's kind, by its class or by its controls, wraps texts in `<s>` and `</s>`."""
    vocabulary = _vocabulary(folder / "vocab.json")
    merges = _merges(folder / "merges.txt", vocabulary)
    named = str(config.get("tokenizer_class", ""))
    is_roberta = named.startswith("Roberta") or (not named and all(name in vocabulary for name in ROBERTA_CONTROLS))
    prefix_space = bool(config.get("add_prefix_space", False))
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": True}
    begin, end = (_token_name(config.get(key)) for key in ("cls_token", "sep_token"))
    processor: dict[str, Any] | None = None
    if is_roberta:
        around = {"cls": begin or "<s>", "sep": end or "</s>"}
        processor = {
            "type": "RobertaProcessing",
            **{role: [name, _id_of(name, vocabulary, folder)] for role, name in around.items()},
            "trim_offsets": True,
            "add_prefix_space": prefix_space,
        }
    controls = (*(ROBERTA_CONTROLS if is_roberta else ()), "<|endoftext|>")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    return _tokenizer_json(
        model=model,
        added=_added_tokens(folder, config, vocabulary, controls),
        normalizer=None,
        pre_tokenizer=byte_level,
        post_processor=processor,
        decoder={**byte_level, "add_prefix_space": True},
    )


def _word_piece_folder(folder: Path, config: dict[str, Any]) -> bytes:
    path = folder / "vocab.txt"
    words = _text(path).removesuffix("\n").split("\n")
    vocabulary = {word.removesuffix("\r"): number for number, word in enumerate(words)}
    unknown = _token_name(config.get("unk_token")) or "[UNK]"
    _id_of(unknown, vocabulary, folder)
    begin = _token_name(config.get("cls_token")) or "[CLS]"
    end = _token_name(config.get("sep_token")) or "[SEP]"
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
        "strip_accents": config.get("strip_accents"),
        "lowercase": bool(config.get("do_lower_case", True)),
    }
    model = {
        "type": "WordPiece",
        "unk_token": unknown,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocabulary,
    }
    around = {"cls": begin, "sep": end}
    return _tokenizer_json(
        model=model,
        added=_added_tokens(folder, config, vocabulary, BERT_CONTROLS),
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor={
            "type": "BertProcessing",
            **{role: [name, _id_of(name, vocabulary, folder)] for role, name in around.items()},
        },
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def _tokenizer_json(*, model: dict[str, Any], added: list[dict[str, Any]], **parts: Any) -> bytes:
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts, "model": model}
    return json.dumps(content, ensure_ascii=False).encode()


def _added_tokens(
    folder: Path, config: dict[str, Any], vocabulary: dict[str, int], controls: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The family's controls, and what the side files add, by id."""
    added = {name: {"id": vocabulary[name], "content": name, **_FLAGS} for name in controls if name in vocabulary}
    for name, number in _object(folder / "added_tokens.json").items():
        if type(number) is int:
            added[name] = {"id": number, "content": name, **_FLAGS, "special": False}
    for role, token in _object(folder / "special_tokens_map.json").items():
        for one in token if isinstance(token, list) else [token]:
            special = _token_name(one) or ""
            number = vocabulary.get(special, added.get(special, {}).get("id"))
            if special and number is not None:
                added[special] = {"id": number, "content": special, **_FLAGS, "lstrip": role == "mask_token"}
    for number_text, token in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and str(number_text).isdigit():
            known = {key: bool(token.get(key, value)) for key, value in _FLAGS.items()}
            added[token["content"]] = {"id": int(number_text), "content": token["content"], **known}
    return sorted(added.values(), key=lambda token: int(token["id"]))


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary = _object(path)
    if not vocabulary or not all(type(number) is int and number >= 0 for number in vocabulary.values()):
        raise TokenizerError(
            f"{path} isn't a vocabulary: it must be a JSON object of token to id", hint="get that file again"
        )
    return vocabulary


def _merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Lines of two tokens, after a line that says the version of the format."""
    merges = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not right or " " in right or left + right not in vocabulary:
            raise TokenizerError(
                f"{path} line {number} isn't a merge of two tokens into a known one: {line[:40]!r}",
                hint="get vocab.json and merges.txt again, both from one tokenizer",
            )
        merges.append((left, right))
    return merges


def _id_of(name: str, vocabulary: dict[str, int], folder: Path) -> int:
    if name not in vocabulary:
        raise TokenizerError(
            f"the vocabulary in {str(folder)!r} has no token {name!r}",
            hint="name its control tokens in tokenizer_config.json (cls_token, sep_token, unk_token)",
        )
    return vocabulary[name]


def _token_name(token: Any) -> str | None:
    """Side files say a token as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} isn't UTF-8: {error}", hint="get that file again; it is damaged") from None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} isn't a JSON object: {error}", hint="mend or remove that file") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} isn't a JSON object", hint="mend or remove that file")
    return value
