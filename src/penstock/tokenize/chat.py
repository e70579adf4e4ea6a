"""What templates need to know of a tokenizer, and its own chat template.

In: a loaded tokenizer, and the folder that it came from. Out: `TemplateVocabulary`. The chat template is read from
chat_template.jinja, additional_chat_templates/*.jinja or tokenizer_config.json, and the special tokens that it may name
from tokenizer_config.json or special_tokens_map.json, as `transformers` reads them. Nothing is run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import TokenizerError
from penstock.sources.records.templates import TemplateVocabulary
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["template_vocabulary", "tokenizer_folder"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_folder(value: str) -> Path | None:
    """Where the files beside a `--tokenizer` value lie, once it was loaded; None: nowhere."""
    path = Path(value)
    if path.exists():
        return path
    from penstock.tokenize.hub import hub_folder, is_hub_id

    return hub_folder(value, network=False) if is_hub_id(value) else None


def template_vocabulary(tokenizer: Tokenizer, *, folder: Path | None = None) -> TemplateVocabulary:
    """The control tokens of a tokenizer, and the chat templates in its folder.

    Args:
        tokenizer: loaded.
        folder: where it came from, or a file in it; None: it has no chat template of its own.

    Raises:
        TokenizerError: a file of the folder isn't what its name says.
    """
    spec = tokenizer.spec
    names = {token: name for name, token in spec.control_tokens.items()}
    folder = folder.parent if folder is not None and folder.is_file() else folder
    config = _json_object(folder / "tokenizer_config.json") if folder else {}
    special_map = _json_object(folder / "special_tokens_map.json") if folder else {}
    return TemplateVocabulary(
        control_names=frozenset(spec.control_tokens),
        kept_names=frozenset(spec.kept_tokens),
        begin=tuple(names[token] for token in spec.begin_ids),
        end=names[spec.end_id],
        special_tokens=tuple(_special_tokens({**special_map, **config}).items()),
        chat_templates=tuple(_chat_templates(folder, config).items()) if folder else (),
    )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            named[name] = token
    return named


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files come before what the config says."""
    given = config.get("chat_template")
    templates: dict[str, str] = {"default": given} if isinstance(given, str) else {}
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
            templates[item["name"]] = item["template"]
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    return templates


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} isn't a JSON object: {error}", hint="mend or remove that file") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} isn't a JSON object", hint="mend or remove that file")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} isn't UTF-8 text: {error}", hint="mend or remove that file") from None
