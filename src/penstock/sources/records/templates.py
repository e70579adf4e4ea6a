"""A conversation to the parts of a document, through a template.

In: a row, and what a vocabulary's control tokens are. Out: parts. What the template itself writes is cut at control
tokens; what a record says is text, whatever it spells. Loss is on what the assistant says and on the token that ends
its turn, or where the template's own `{% generation %}` tags put it, or (`loss="all"`) everywhere.

Where an assistant's turn begins and ends is read off the template once, from a conversation of four turns: it begins
where the generation prompt ends, and ends with the control tokens that follow in the middle and at the end alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.errors import ConfigError, InputError, TokenizerError, nearest_first
from penstock.hashing import digest_of
from penstock.sources.document import Part, PartKind
from penstock.sources.records.forms import FIELDS, Conversation, conversation_of
from penstock.sources.records.marks import ControlNames, Stretch, rendered_stretches
from penstock.sources.records.sandbox import (
    CompiledTemplate,
    TemplateFailedError,
    TemplateLimitError,
    compiled_template,
)
from penstock.sources.records.texts import BUILT_IN, PLAIN, TOKENIZER
from penstock.sources.rows import BadRowError

__all__ = ["LOSSES", "TEMPLATES", "TemplateRenderer", "TemplateVocabulary", "control_tokens_of", "row_renderer"]

TEMPLATES = (*sorted(BUILT_IN), PLAIN, TOKENIZER)
LOSSES = ("assistant", "all")
END_TOKEN = "<|endoftext|>"  # noqa: S105  a vocabulary entry, not a password
PLAIN_VERSION = 1
PROBE = ("a question", "an answer")


@dataclass(frozen=True, kw_only=True)
class TemplateVocabulary:
    """What templates need to know of a tokenizer; filled by `penstock.tokenize.chat`.

    Attributes:
        control_names: every token that text can't reach.
        kept_names: added tokens that text can reach.
        begin: control tokens that the tokenizer itself puts before a text.
        end: the control token after each document.
        special_tokens: what the tokenizer's own template may name: (`bos_token`, `<s>`)…
        chat_templates: the tokenizer's own, by name; the one used is `default`, or `tool_use` for records with tools.
    """

    control_names: frozenset[str]
    kept_names: frozenset[str] = frozenset()
    begin: tuple[str, ...] = ()
    end: str = END_TOKEN
    special_tokens: tuple[tuple[str, str], ...] = ()
    chat_templates: tuple[tuple[str, str], ...] = ()

    @classmethod
    def to_be_trained(cls, template: str, *, end_token: str | None = None) -> TemplateVocabulary:
        """Of a vocabulary that will be trained for a template, with `control_tokens_of(template)`."""
        end = END_TOKEN if end_token is None else end_token
        return cls(control_names=frozenset([*control_tokens_of(template), end]), end=end)


def control_tokens_of(template: str) -> tuple[str, ...]:
    """The control tokens that a vocabulary trained for a built-in template gets besides its end token.

    Raises:
        ConfigError: the template isn't known.
        TokenizerError: the template is the tokenizer's own, and there is no tokenizer.
    """
    _check_name(template)
    if template == TOKENIZER:
        raise TokenizerError(
            "--template tokenizer is the tokenizer's own chat template, but no tokenizer was given",
            hint=f"add --tokenizer FOLDER, or name a template: {', '.join(sorted(BUILT_IN))}",
        )
    built_in = BUILT_IN.get(template)
    return (*built_in.control_tokens, *built_in.more_control_tokens) if built_in else ()


def row_renderer(
    template: str,
    *,
    vocabulary: TemplateVocabulary,
    field_map: Sequence[tuple[str, str]] = (),
    loss: str = "assistant",
) -> TemplateRenderer:
    """A renderer that was tried out.

    Raises:
        ConfigError: a name isn't known.
        TokenizerError: the vocabulary lacks a token of the template, or has no template of its own.
        InputError: the template can't be used.
    """
    _check_name(template)
    if loss not in LOSSES:
        raise ConfigError(f"--loss {loss!r} isn't known", hint=f"known: {', '.join(LOSSES)}")
    renderer = TemplateRenderer(template=template, vocabulary=vocabulary, field_map=tuple(field_map), loss=loss)
    renderer.check()
    return renderer


def _check_name(template: str) -> None:
    if template not in TEMPLATES:
        raise ConfigError(f"template {template!r} isn't known", hint=f"known: {nearest_first(template, TEMPLATES)}")


@dataclass(frozen=True, kw_only=True)
class TemplateRenderer:
    """Makes documents of records; a `RowRenderer`. Data: what it compiles stays behind when it is pickled.

    Attributes:
        template: a name of `TEMPLATES`.
        vocabulary: whose control tokens.
        field_map: (field, column) pairs, as `parse_field_map` gives them.
        loss: `assistant`, or `all`.
    """

    template: str
    vocabulary: TemplateVocabulary
    field_map: tuple[tuple[str, str], ...] = ()
    loss: str = "assistant"

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """What a vocabulary trained for it gets besides its end token."""
        return () if self.template == TOKENIZER else control_tokens_of(self.template)

    @property
    def framed(self) -> bool:
        """Templates spell their own beginning and end; plain text doesn't."""
        return self.template != PLAIN

    def columns(self, available: Sequence[str] | None) -> tuple[str, ...]:
        """The columns that a record may have; of a table, those that it does have.

        Raises:
            InputError: it has none.
        """
        mapped = dict(self.field_map)
        wanted = tuple(dict.fromkeys(mapped.get(name, name) for name in FIELDS))
        if available is None:
            return wanted
        missing = [column for column in mapped.values() if column not in available]
        found = tuple(column for column in wanted if column in available)
        if missing or not found:
            lacks = f"column {missing[0]!r}" if missing else "column of a record (messages, instruction, prompt, text…)"
            raise InputError(
                f"the table has no {lacks}",
                hint=f"it has {', '.join(available) or 'none'}; name them with --field-map, as in response=COLUMN",
            )
        return found

    def parts(self, row: Mapping[str, Any]) -> tuple[Part, ...]:
        """The parts of a record.

        Raises:
            BadRowError: this row isn't one, or the template refuses it; `records` and `marks` name the reasons.
            InputError: the template goes beyond its bounds.
        """
        conversation = conversation_of(row, dict(self.field_map))
        if conversation.text is not None:
            begin = [_control(name, loss=self.loss == "all") for name in self.vocabulary.begin] if self.framed else []
            return (*begin, Part(data=conversation.text.encode()))
        if self.loss == "assistant" and not any(conversation.learnt):
            raise BadRowError("no-assistant-turn", "no message that the model should learn to say")
        if self.template == PLAIN:
            return self._plain(conversation)
        return self._parts(conversation)

    def options(self) -> dict[str, Any]:
        """What decides the content, the template's text and version among it."""
        if self.template == PLAIN:
            text: dict[str, Any] = {"version": PLAIN_VERSION}
        elif self.template == TOKENIZER:
            own = [list(pair) for pair in self.vocabulary.chat_templates]
            text = {"text": digest_of([own, [list(pair) for pair in self.vocabulary.special_tokens]])}
        else:
            text = {"version": BUILT_IN[self.template].version, "text": digest_of(BUILT_IN[self.template].text)}
        fields = [list(pair) for pair in self.field_map]
        return {"kind": "template", "template": self.template, **text, "field_map": fields, "loss": self.loss}

    def check(self) -> None:
        """Tries the template on a short conversation, so that what is wrong with it is said once, not per row."""
        if self.template == PLAIN:
            return
        self._check_vocabulary()
        if self.template == TOKENIZER and not self.vocabulary.chat_templates:
            raise TokenizerError(
                "this tokenizer has no chat template of its own",
                hint="give the folder that holds its tokenizer_config.json or chat_template.jinja, or name a template:"
                f" {', '.join(sorted(BUILT_IN))}",
            )
        problem = None
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            messages = [{"role": role, "content": PROBE[role == "assistant"]} for role in roles]
            try:
                self._parts(Conversation(messages=messages, learnt=[role == "assistant" for role in roles], size=100))
            except BadRowError as error:
                problem = problem or error
            else:
                return
        assert problem is not None
        raise InputError(
            f"chat template {self.template!r} can't be used: {problem.detail}",
            hint=f"name another with --template: {', '.join(sorted(BUILT_IN))}",
        )

    def __getstate__(self) -> dict[str, Any]:
        """The fields; what was compiled from them is compiled again on the other side."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _check_vocabulary(self) -> None:
        built_in = BUILT_IN.get(self.template)
        missing = [name for name in built_in.control_tokens if name not in self._names.controls] if built_in else []
        if missing:
            raise TokenizerError(
                f"template {self.template!r} needs the control token {missing[0]!r}, which this tokenizer doesn't have",
                hint="use a tokenizer of that family, --template tokenizer for its own, or no --tokenizer: then one is"
                f" trained with {', '.join(control_tokens_of(self.template))}",
            )

    @cached_property
    def _names(self) -> ControlNames:
        return ControlNames(self.vocabulary.control_names, self.vocabulary.kept_names)

    @cached_property
    def _turns(self) -> dict[str, _Turn]:
        """How turns look, by the template's text."""
        return {}

    def _text(self, conversation: Conversation) -> str:
        """The template's Jinja text."""
        if self.template != TOKENIZER:
            return BUILT_IN[self.template].text
        own = dict(self.vocabulary.chat_templates)
        if conversation.tools and "tool_use" in own:
            return own["tool_use"]
        if "default" in own:
            return own["default"]
        raise TokenizerError(
            f"the tokenizer has several chat templates ({', '.join(own)}), none of them named default",
            hint="name the one that is meant `default` in its tokenizer_config.json",
        )

    def _variables(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompt: bool) -> dict[str, Any]:
        """What the template sees, as `transformers` gives it."""
        if self.template == TOKENIZER:
            special = dict(self.vocabulary.special_tokens)
        else:
            special = {"bos_token": "".join(self.vocabulary.begin), "eos_token": self.vocabulary.end}
        return {
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **special,
        }

    def _plain(self, conversation: Conversation) -> tuple[Part, ...]:
        messages = conversation.messages
        roles = [message["role"] for message in messages]
        if roles != ["user", "assistant"] or "instruction" in messages[0]:
            raise BadRowError("no-record", "template plain takes text, or prompt and completion")
        losses = (self.loss == "all", True)
        texts = [message["content"].encode() for message in messages]
        return tuple(Part(data=text, loss=loss) for text, loss in zip(texts, losses, strict=True) if text)

    def _parts(self, conversation: Conversation) -> tuple[Part, ...]:
        text = self._text(conversation)
        template = compiled_template(text, name=self.template)
        stretches, as_text = self._stretches(template, conversation.messages, conversation.tools, conversation.size)
        if self.loss == "all":
            lossy = [(stretch, 0, len(stretch.text)) for stretch in stretches]
        elif template.has_generation_tags:
            lossy = [(stretch, 0, len(stretch.text) if stretch.generated else 0) for stretch in stretches]
        else:
            turn = self._turns.get(text) or self._turns.setdefault(text, self._turn(template))
            lossy = list(_with_loss(_joined(stretches), conversation.learnt, turn, self._names))
        if not any(end > start for _, start, end in lossy):
            raise BadRowError("no-assistant-turn", "the template shows nothing that the assistant says")
        return tuple(_merged(part for piece in lossy for part in self._cut(*piece, as_text)))

    def _stretches(
        self, template: CompiledTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, size: int, *,
        prompt: bool = False,
    ) -> tuple[list[Stretch], set[str]]:  # fmt: skip
        variables = self._variables(messages, tools, prompt=prompt)
        try:
            return rendered_stretches(template, variables, names=self._names, input_size=size)
        except TemplateFailedError as error:
            raise BadRowError("template-refused", f"the template says: {error}") from None
        except TemplateLimitError as error:
            raise InputError(
                f"chat template {self.template!r} was stopped: {error}",
                hint="mend the template, or name a built-in one with --template",
            ) from None

    def _turn(self, template: CompiledTemplate) -> _Turn:
        """How the template begins and ends what the assistant says; nothing where it takes no such conversation."""
        user, assistant = (
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), PROBE, strict=True)
        )
        try:
            full, _ = self._stretches(template, [user, assistant, user, assistant], None, 100)
            asked, _ = self._stretches(template, [user], None, 100, prompt=True)
        except BadRowError:
            return _Turn(opening=None if template.has_generation_prompt else "", closing=None)
        full, asked = _joined(full), _joined(asked)
        return _Turn(
            opening=_opening(full, asked, self._names) if template.has_generation_prompt else "",
            closing=_closing(full, self._names),
        )

    def _cut(self, stretch: Stretch, start: int, end: int, as_text: set[str]) -> Iterator[Part]:
        """A stretch as parts; `start` to `end` of it carries loss."""
        if stretch.owner is not None:
            yield Part(data=stretch.text.encode(), loss=end > start)  # all of it or nothing
            return
        position = 0
        for match in self._names.find(stretch.text):
            if match[0] in as_text:
                continue
            yield from _text_parts(stretch.text, position, match.start(), start, end)
            yield _control(match[0], loss=start <= match.start() < end)
            position = match.end()
        yield from _text_parts(stretch.text, position, len(stretch.text), start, end)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """How a template frames what an assistant says.

    Attributes:
        opening: what the template writes last before it; empty: spaces before it are said too; None: unknown.
        closing: what it writes after it, up to the last control token of the turn; None: unknown.
    """

    opening: str | None
    closing: str | None


def _opening(full: list[Stretch], asked: list[Stretch], names: ControlNames) -> str | None:
    """The end of what stands before the first answer as well as in a prompt for one; None where nothing does."""
    before, prompt = _own_words_before(full, 1), asked[-1].text if asked and asked[-1].owner is None else ""
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False))
    length = sum(1 for _ in shared)
    # Controls are whole: a common beginning of two different ones is none.
    inside = [match for match in names.find(before) if match.start() < length]
    if inside and inside[-1].end() > length:
        length = inside.pop().start()
    last = inside[-1].start() if inside else 0
    return before[last:length] or None


def _closing(full: list[Stretch], names: ControlNames) -> str | None:
    """The control tokens, and what lies between, that follow an answer in the middle and at the end alike."""
    middle, last = _own_words_before(full, 2), full[-1].text if full and full[-1].owner is None else ""
    if not any(stretch.owner == 1 for stretch in full):
        return None
    end = 0
    for first, second in zip(names.find(middle), names.find(last), strict=False):
        if middle[: first.end()] != last[: second.end()]:
            break
        end = first.end()
    return middle[:end]


def _own_words_before(stretches: list[Stretch], owner: int) -> str:
    """What the template writes just before a message; nothing where it doesn't show it."""
    for stretch, following in itertools.pairwise(stretches):
        if following.owner == owner:
            return stretch.text if stretch.owner is None else ""
    return ""


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    """Stretches of the template's own words next to each other as one."""
    joined: list[Stretch] = []
    for stretch in stretches:
        if joined and stretch.owner is None and joined[-1].owner is None:
            stretch = Stretch(text=joined.pop().text + stretch.text, owner=None)
        joined.append(stretch)
    return joined


def _with_loss(
    stretches: list[Stretch], learnt: list[bool], turn: _Turn, names: ControlNames
) -> Iterator[tuple[Stretch, int, int]]:
    """Each stretch with the run of its characters that carries loss."""

    def says(number: int) -> int | None:
        """The message at a place, if it is one to be learnt."""
        owner = stretches[number].owner if 0 <= number < len(stretches) else None
        return owner if owner is not None and owner >= 0 and learnt[owner] else None

    for number, stretch in enumerate(stretches):
        length = len(stretch.text)
        before, after = says(number - 1), says(number + 1)
        if stretch.owner is not None:
            yield stretch, 0, length if says(number) is not None else 0
        elif before is not None and before == after:
            yield stretch, 0, length  # a template's own words inside a message, such as those around a call's arguments
        else:
            closed = _closed(stretch.text, turn, names) if before is not None else 0
            opened = _opened(stretch.text, turn) if after is not None else length
            # Two runs in one stretch, where assistants' messages follow each other.
            yield Stretch(text=stretch.text[:opened], owner=None), 0, min(closed, opened)
            yield Stretch(text=stretch.text[opened:], owner=None), 0, length - opened


def _closed(text: str, turn: _Turn, names: ControlNames) -> int:
    """Where an assistant's turn ends in what the template writes after it."""
    if turn.closing == "":
        return 0
    if turn.closing is not None and (found := text.find(turn.closing)) >= 0:
        return found + len(turn.closing)
    first = next(names.find(text), None)
    return first.end() if first is not None and not text[: first.start()].strip() else 0


def _opened(text: str, turn: _Turn) -> int:
    """Where an assistant's turn begins in what the template writes before it."""
    if turn.opening == "":
        return len(text.rstrip(" "))
    found = text.rfind(turn.opening) if turn.opening is not None else -1
    return found + len(turn.opening or "") if found >= 0 else len(text)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each of the names that templates know, as `transformers` gives it."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _control(name: str, *, loss: bool) -> Part:
    return Part(data=name.encode(), kind=PartKind.CONTROL, loss=loss)


def _text_parts(text: str, first: int, last: int, start: int, end: int) -> Iterator[Part]:
    """`text[first:last]` in up to three parts: before, inside and after the run that carries loss."""
    borders = [first, min(max(start, first), last), min(max(end, first), last), last]
    for number, loss in enumerate((False, True, False)):
        if borders[number] < borders[number + 1]:
            yield Part(data=text[borders[number] : borders[number + 1]].encode(), loss=loss)


def _merged(parts: Iterator[Part]) -> Iterator[Part]:
    """Adjoining text parts of equal loss as one."""
    waiting: list[Part] = []
    for part in parts:
        if waiting and (part.kind is PartKind.CONTROL or part.loss != waiting[0].loss):
            yield Part(data=b"".join(piece.data for piece in waiting), loss=waiting[0].loss)
            waiting = []
        if part.kind is PartKind.CONTROL:
            yield part
        else:
            waiting.append(part)
    if waiting:
        yield Part(data=b"".join(piece.data for piece in waiting), loss=waiting[0].loss)
