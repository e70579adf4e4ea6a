"""The step between reading and encoding that leaves documents out or mends them.

In: the documents of a unit as a source read them. Out: those that stay, the very same objects where nothing had to be
done. What goes is counted:

    too-short · generated · minified · secret (where secrets mean that the document is dropped)

A redacted document has a marker such as `[redacted github-token]` in the place of each secret, is no longer exact, and
its facts count the secrets by kind; nothing derived from a secret is kept. A file that names its licence
(`SPDX-License-Identifier:`) has it in its facts. Cleaning what was cleaned changes nothing.

Costs about 1 ns per byte of clean code, a few µs per document; memory is that of the documents that change.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError, nearest_first
from penstock.hashing import canonical_json
from penstock.sources.document import Document, PartKind
from penstock.sources.hygiene.content import CONTENT_RULES_VERSION, head_of, is_generated_name, is_minified
from penstock.sources.hygiene.languages import CODE_LANGUAGES
from penstock.sources.hygiene.secrets import SECRET_RULES_VERSION, redacted, secret_spans
from penstock.sources.source import UnitText

__all__ = ["Cleaning", "CleaningOptions"]

SECRETS = ("redact", "drop", "keep")


@dataclass(frozen=True, kw_only=True)
class CleaningOptions:
    """What becomes of documents that were read.

    Attributes:
        secrets: redact, drop or keep; None redacts in files and git and keeps in tables and data sets.
        minified: whether minified code is kept.
        generated: whether generated code is kept.
        min_bytes: shorter documents are left out.
    """

    secrets: str | None = None
    minified: bool = False
    generated: bool = False
    min_bytes: int = 0

    def __post_init__(self) -> None:
        if self.secrets is not None and self.secrets not in SECRETS:
            raise ConfigError(
                f"--secrets {self.secrets!r} is none of {', '.join(SECRETS)}",
                hint=f"choose one of {nearest_first(self.secrets, SECRETS)}",
            )


class Cleaning:
    """Applies the rules over content to what a source read.

    Args:
        options: which rules, and what they do.
        is_code: whether the source is files or git; the rules about code are for these.
    """

    def __init__(self, options: CleaningOptions, *, is_code: bool) -> None:
        self._secrets = options.secrets if options.secrets is not None else ("redact" if is_code else "keep")
        self._min_bytes = options.min_bytes
        self._is_code = is_code
        self._drops_minified = is_code and not options.minified
        self._drops_generated = is_code and not options.generated

    def options(self) -> dict[str, Any]:
        """The settings in effect, with the versions of the rules that they switch on; part of the store digest."""
        effective: dict[str, Any] = {"secrets": self._secrets, "min_bytes": self._min_bytes}
        if self._secrets != "keep":
            effective["secret_rules"] = SECRET_RULES_VERSION
        if self._is_code:
            effective["minified"] = not self._drops_minified
            effective["generated"] = not self._drops_generated
            effective["content_rules"] = CONTENT_RULES_VERSION
        return effective

    def clean(self, text: UnitText) -> UnitText:
        """What is left of a unit; the tally that came in goes on counting."""
        kept: list[Document] = []
        finds_secrets = self._secrets != "keep"
        for document in text.documents:
            reason = self._problem(document)
            if reason is None and finds_secrets and _has_secrets(document):
                if self._secrets == "drop":
                    reason = "secret"
                else:
                    document = _redacted(document)
            if reason is None:
                kept.append(document)
            else:
                text.skips.add(reason, document.key)
        return UnitText(documents=kept, skips=text.skips)

    def _problem(self, document: Document) -> str | None:
        """The reason to leave a document out for what it is; notes the licence of one that stays."""
        if self._min_bytes and document.num_bytes < self._min_bytes:
            return "too-short"
        # A commit, or whatever else was rendered, is no file: what its text says isn't said about it.
        if not self._is_code or not document.exact or len(document.parts) != 1:
            return None
        data = document.parts[0].data
        name = document.path.rpartition(b"/")[2].lower()
        is_code = document.language in CODE_LANGUAGES
        head = head_of(data)
        if self._drops_generated and ((is_code and head.is_generated) or is_generated_name(name)):
            return "generated"
        if is_code and self._drops_minified and is_minified(name, data):
            return "minified"
        if head.licence:
            document.facts = _with_licence(document.facts, head.licence)
        return None


def _has_secrets(document: Document) -> bool:
    # A loop, not any(): documents are many, nearly all have one part, and a generator costs as much as the search.
    for part in document.parts:
        if part.kind is PartKind.TEXT and secret_spans(part.data):
            return True
    return bool(document.facts) and _facts_have_secrets(document.facts)


@functools.lru_cache(maxsize=64)
def _facts_have_secrets(facts: str) -> bool:
    """Remembered for the few facts that most files of a project share: their licence."""
    return _without_secrets(facts, {}) != facts


def _redacted(document: Document) -> Document:
    """A copy with markers in the place of the secrets, which its facts count by kind."""
    found: dict[str, int] = {}
    parts = tuple(
        replace(part, data=redacted(part.data, found)) if part.kind is PartKind.TEXT else part
        for part in document.parts
    )
    facts = _without_secrets(document.facts, found) if document.facts else ""
    told = replace(document, facts=_with_facts(facts, {"secrets": found}))
    return told if parts == document.parts else replace(told, parts=parts, exact=False, text_hash=b"")


def _without_secrets(facts: str, found: dict[str, int]) -> str:
    """The facts with markers in the place of secrets: a row's other columns and a branch's name may hold some."""
    # Names stand beside their values in the text, which the rules about passwords need. An escaped character before a
    # secret would hide it there, so that such strings are looked at one by one.
    if "\\" not in facts and not secret_spans(facts.encode()):
        return facts
    one_by_one = canonical_json(_redacted_strings(json.loads(facts), found)).decode()
    with_names = dict[str, int]()
    text = redacted(one_by_one.encode(), with_names).decode()
    try:
        json.loads(text)
    except json.JSONDecodeError:  # the rule took more than a string: what was found one by one is what is sure
        return one_by_one
    for kind, count in with_names.items():
        found[kind] = found.get(kind, 0) + count
    return text


def _redacted_strings(value: Any, found: dict[str, int]) -> Any:
    if isinstance(value, str):
        return redacted(value.encode(), found).decode()
    if isinstance(value, list):
        return [_redacted_strings(one, found) for one in value]
    if isinstance(value, dict):
        return {name: _redacted_strings(one, found) for name, one in value.items()}
    return value


@functools.lru_cache
def _only_licence(licence: str) -> str:
    return canonical_json({"licence": licence}).decode()


def _with_licence(facts: str, licence: str) -> str:
    """The facts with the licence; kept for the next file, because most files of a project have few and no other."""
    return _with_facts(facts, {"licence": licence}) if facts else _only_licence(licence)


def _with_facts(facts: str, more: Mapping[str, Any]) -> str:
    """A JSON object as text with members added."""
    return canonical_json({**json.loads(facts), **more} if facts else more).decode()
