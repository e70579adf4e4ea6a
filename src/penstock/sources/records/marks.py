"""Which characters of a rendered template are a record's own, found by marking them.

In: a compiled template and a conversation. Out: the rendered text as stretches, each either the template's own words or
those of one message. Nothing is guessed: the conversation is rendered as it is, and once more with a pair of marks
(private-use characters that occur nowhere in it) around each string. Without its marks the second text must be the
first; then the marks in it say what is whose. A template that treats marked strings otherwise (cuts by position, say)
is told by the comparison, and the row is refused.

Marks stand inside surrounding whitespace and beside strings that the template looks for, so that `trim` and
`split('</think>')` do to marked strings what they do to plain ones. Costs two renderings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.sources.records.sandbox import CompiledTemplate
from penstock.sources.rows import BadRowError

__all__ = ["NO_MESSAGE", "ControlNames", "Stretch", "rendered_stretches"]

PRIVATE_USE = re.compile("[\U000f0000-\U0010ffff]")
FIRST_MARK, LAST_MARK = 0xF0000, 0x10FFFD
NO_MESSAGE = -1
"""Owner of words that are the record's but no message's, such as the descriptions of tools."""

SCHEMA_WORDS = frozenset(
    {
        "role", "content", "name", "type", "function", "arguments", "parameters", "properties", "required",
        "description", "enum", "items", "tool_calls", "id", "tool_call_id", "reasoning_content", "thinking",
        "reasoning", "instruction", "input", "format", "default", "title", "strict", "return",
    }
)  # fmt: skip
"""Keys by which templates reach into messages and tools; they stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A piece of rendered text.

    Attributes:
        text: as rendered.
        owner: number of the message whose words they are, `NO_MESSAGE`, or None: the template's own.
        generated: whether it stands between `{% generation %}` tags.
    """

    text: str
    owner: int | None
    generated: bool = False


class ControlNames:
    """Control tokens by name, and how to find them in a template's own text."""

    def __init__(self, controls: frozenset[str], kept: frozenset[str]) -> None:
        self.controls = controls
        # Tokens that aren't controls are looked for as well: the longest name at a place wins, as in `tokenizers`.
        names = sorted((name for name in controls | kept if name), key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._controls_pattern = re.compile("|".join(re.escape(name) for name in names if name in controls) or r"(?!)")
        self._ends = frozenset(name[end] for name in controls if name for end in (0, -1))
        self._joined = "\n".join(sorted(controls))
        self.keep_whitespace = any(name != name.strip() for name in controls)

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """The control tokens in a text, left to right."""
        return (match for match in self._pattern.finditer(text) if match[0] in self.controls)

    def spelt_in(self, text: str) -> set[str]:
        """Every control token that a text spells, overlapping ones too."""
        if not self._controls_pattern.search(text):
            return set()
        return {name for name in self.controls if name in text}

    def is_inert(self, text: str) -> bool:
        """Whether no text around it could make a control token with it."""
        return not self._ends.intersection(text) and text not in self._joined


def rendered_stretches(
    template: CompiledTemplate, variables: dict[str, Any], *, names: ControlNames, input_size: int
) -> tuple[list[Stretch], set[str]]:
    """The rendering of `variables`, and the control names that are text throughout it.

    Those are names that a message spells and the template looks for (`</think>`): such words stand outside of the
    marks, so where they turn up nobody can tell whose they are.

    Raises:
        BadRowError: `template-unsure`.
        TemplateFailedError, TemplateLimitError: as `CompiledTemplate.render`.
    """
    marking = _Marking(template, names, variables)
    marked = marking.variables()
    text = template.render(variables, input_size=input_size)
    marked_text = template.render(marked, input_size=2 * input_size + 1000, marks=marking.generation)
    stretches = list(marking.stretches(marked_text))
    if "".join(stretch.text for stretch in stretches) != text:
        raise BadRowError("template-unsure", "the template changes this content in a way that can't be followed")
    return stretches, marking.ambiguous


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """What stands between two marks."""

    owner: int
    whole: str
    begin: str
    end: str


class _Marking:
    """The marks of one conversation."""

    def __init__(self, template: CompiledTemplate, names: ControlNames, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._names = names
        self._searched = re.compile("|".join(map(re.escape, template.searched))) if template.searched else None
        self._free = self._unused_characters({**variables, "template": template.source})
        self._pieces: dict[str, _Piece] = {}
        self.generation = (next(self._free), next(self._free))
        self.ambiguous: set[str] = set()

    @staticmethod
    def _unused_characters(variables: dict[str, Any]) -> Iterator[str]:
        used: set[str] = set()
        waiting: list[Any] = [variables]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                used.update(PRIVATE_USE.findall(item))
            elif isinstance(item, dict):
                waiting += [*item, *item.values()]
            elif isinstance(item, list):
                waiting += item
        return (chr(number) for number in range(FIRST_MARK, LAST_MARK + 1) if chr(number) not in used)

    def variables(self) -> dict[str, Any]:
        """The conversation with marks in it."""
        messages = [self._message(number, message) for number, message in enumerate(self._variables["messages"])]
        return {**self._variables, "messages": messages, "tools": self._value(self._variables.get("tools"), NO_MESSAGE)}

    def _message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        marked: dict[str, Any] = {}
        for key, value in message.items():
            if key == "role":
                marked[key] = value
            elif isinstance(value, str) and key not in ("name", "tool_call_id"):
                marked[key] = self._content(value, number)
            else:
                marked[key] = self._value(value, number)
        return marked

    def _value(self, value: Any, owner: int, key: str = "") -> Any:
        """Strings of calls, schemas and ids; ids that can't be part of any control token stay as they are."""
        if isinstance(value, str):
            inert = key not in ("name", "arguments", "content") and len(value) <= 64 and self._names.is_inert(value)
            return value if inert else self._marked(value, value, owner)
        if isinstance(value, list):
            return [self._value(item, owner) for item in value]
        if isinstance(value, dict):
            return {self._key(name, owner): self._value(item, owner, name) for name, item in value.items()}
        return value

    def _key(self, key: str, owner: int) -> str:
        return key if key in SCHEMA_WORDS or self._names.is_inert(key) else self._marked(key, key, owner)

    def _content(self, text: str, owner: int) -> str:
        """Marks around a message's words, less the whitespace around and the words that the template looks for."""
        core = text if self._names.keep_whitespace else text.strip()
        if not core:
            return text
        lead = text.index(core)
        pieces, position = [], 0
        for start, end in self._gaps(core):
            pieces += [self._marked(core[position:start], text, owner) if start > position else "", core[start:end]]
            self.ambiguous |= self._names.spelt_in(core[start:end])
            position = end
        pieces.append(self._marked(core[position:], text, owner) if position < len(core) else "")
        return text[:lead] + "".join(pieces) + text[lead + len(core) :]

    def _gaps(self, core: str) -> list[tuple[int, int]]:
        """Where the template may cut: each word that it looks for, with the whitespace around it."""
        gaps: list[tuple[int, int]] = []
        for match in self._searched.finditer(core) if self._searched else ():
            start, end = match.span()
            while start > 0 and core[start - 1].isspace():
                start -= 1
            while end < len(core) and core[end].isspace():
                end += 1
            if gaps and start <= gaps[-1][1]:
                start = gaps.pop()[0]
            gaps.append((start, end))
        # Words that the template looks for and nothing else: marked as they are, or they would have no owner.
        return [] if gaps == [(0, len(core))] else gaps

    def _marked(self, text: str, whole: str, owner: int) -> str:
        if not text:
            return text
        try:
            piece = _Piece(owner=owner, whole=whole, begin=next(self._free), end=next(self._free))
        except StopIteration:
            raise BadRowError("too-long", "more strings than there are marks") from None
        self._pieces[piece.begin] = self._pieces[piece.end] = piece
        return f"{piece.begin}{text}{piece.end}"

    def stretches(self, rendered: str) -> Iterator[Stretch]:
        """Cuts a marked rendering at its marks."""
        unsure = BadRowError("template-unsure", "the template takes this content apart")
        current: _Piece | None = None
        depth = 0
        position = 0
        for match in PRIVATE_USE.finditer(rendered):
            mark = match[0]
            if mark not in self._pieces and mark not in self.generation:
                continue  # the record's own, or the template's
            if text := rendered[position : match.start()]:
                yield self._stretch(text, current, generated=depth > 0)
            position = match.end()
            if mark in self.generation:
                depth += 1 if mark == self.generation[0] else -1
            elif current is None and self._pieces[mark].begin == mark:
                current = self._pieces[mark]
            elif current is not None and current.end == mark:
                current = None
            else:
                raise unsure
        if current is not None or depth:
            raise unsure
        if rest := rendered[position:]:
            yield self._stretch(rest, None, generated=False)

    def _stretch(self, text: str, piece: _Piece | None, *, generated: bool) -> Stretch:
        """One stretch; a template that writes its own control tokens between a message's words is refused."""
        if (
            piece is not None
            and text not in piece.whole
            and self._names.spelt_in(text) - self._names.spelt_in(piece.whole)
        ):
            raise BadRowError("template-unsure", "the template writes control tokens inside this content")
        return Stretch(text=text, owner=piece.owner if piece else None, generated=generated)
