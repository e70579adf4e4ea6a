"""`--template`, `--field-map` and `--loss` to the renderer of rows that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.sources import TemplateRenderer, TemplateVocabulary
    from penstock.tokenize import Tokenizer


def renderer_of(
    template: str | None,
    *,
    field_map: Sequence[str],
    loss: str,
    tokenizer: Tokenizer | None,
    tokenizer_value: str | None,
    end_token: str | None = None,
    out: Path,
) -> TemplateRenderer | None:
    """The renderer; None where neither a template nor a field map was given.

    Args:
        template: name of a template; None with a field map: plain text.
        field_map: TARGET=COLUMN words.
        loss: what is learnt of a record.
        tokenizer: the one asked for.
        tokenizer_value: where it lies, and its own chat template with it.
        end_token: name of the end token of one that will be trained.
        out: a store that may have a tokenizer.
    """
    if template is None and not field_map:
        if loss != "assistant":
            raise ConfigError(
                f"--loss {loss} does nothing without --template or --field-map: of plain text all is learnt",
                hint="leave it out, or add --template",
            )
        return None
    from penstock.sources.records.forms import parse_field_map
    from penstock.sources.records.templates import row_renderer

    template = template or "plain"
    vocabulary = _vocabulary(template, tokenizer, tokenizer_value, end_token, out)
    return row_renderer(template, vocabulary=vocabulary, field_map=parse_field_map(field_map), loss=loss)


def _vocabulary(
    template: str, tokenizer: Tokenizer | None, value: str | None, end_token: str | None, out: Path
) -> TemplateVocabulary:
    """Of the tokenizer asked for, else the store's, else the one that will be trained."""
    from penstock.sources import TemplateVocabulary
    from penstock.store import open_store
    from penstock.store.reader import list_versions
    from penstock.tokenize.chat import template_vocabulary, tokenizer_folder

    if tokenizer is not None:
        return template_vocabulary(tokenizer, folder=tokenizer_folder(value) if value else None)
    if out.is_dir() and list_versions(out):
        with open_store(out) as store:
            return template_vocabulary(store.tokenizer())
    return TemplateVocabulary.to_be_trained(template, end_token=end_token)
