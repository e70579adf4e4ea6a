"""HTML in which data can't become markup.

In: text from records: paths, messages, model output, all of it untrusted. Out: `Markup`. A plain string given to `tag`
as a child or as an attribute is always escaped; only `Markup`, which only this module and charts.py make, passes as it
is. Characters that hide or reorder text (controls, terminal escapes, bidi marks, lone surrogates) are shown as
`\\u202e` and set apart, so that what the reader sees is what the data holds. Cost: linear in the text.
"""

from __future__ import annotations

import html
import re
import unicodedata

__all__ = ["Markup", "clipped", "joined", "tag", "visible"]

VOID_ELEMENTS = frozenset({"meta", "link", "br"})
ELEMENTS_WITH_LINES = frozenset({"pre", "samp", "kbd"})
SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Joiners are part of how Persian and emoji are spelt, and neither hides nor moves anything else.
HARMLESS_FORMAT_CHARACTERS = "\u200c\u200d"
HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
ORDINARY_TEXT = re.compile(r"[ -~\n\t]*")


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


def _is_hidden(character: str) -> bool:
    if character in HARMLESS_FORMAT_CHARACTERS:
        return False
    # The last two places of every plane are no characters at all; HTML forbids them.
    return unicodedata.category(character) in HIDDEN_CATEGORIES or ord(character) & 0xFFFE == 0xFFFE


def _escape_of(character: str) -> str:
    code = ord(character)
    return SHORT_ESCAPES.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def visible(text: str, *, keep: str = "") -> str:
    """The text with every hidden character as a visible escape, except those in `keep`: safe for a terminal."""
    return "".join(
        _escape_of(character) if character not in keep and _is_hidden(character) else character for character in text
    )


def _escaped(text: str, *, keep: str) -> str:
    if keep and ORDINARY_TEXT.fullmatch(text):  # nearly all text of a sample row
        return html.escape(text)
    return "".join(
        f'<span class="escape">{_escape_of(character)}</span>'
        if character not in keep and _is_hidden(character)
        else html.escape(character)
        for character in text
    )


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element. `class_` is class, `aria_label` is aria-label; an attribute that is None is left out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID_ELEMENTS:
        return Markup(f"<{name}{shown}>")
    keep = "\n\t" if name in ELEMENTS_WITH_LINES else ""
    inner = "".join(child if isinstance(child, Markup) else _escaped(child, keep=keep) for child in children)
    start = "\n" if name == "pre" else ""  # the parser drops the first newline of a pre: let it be ours
    return Markup(f"<{name}{shown}>{start}{inner}</{name}>")


def joined(parts: list[Markup], *, separator: str = "") -> Markup:
    """Several pieces of markup as one."""
    return Markup((separator if isinstance(separator, Markup) else html.escape(separator)).join(parts))


def clipped(text: str, *, most_characters: int) -> str:
    """The text, or its beginning with the number of characters left out."""
    if len(text) <= most_characters:
        return text
    return f"{text[:most_characters]} … ({len(text) - most_characters:,} more characters)"
