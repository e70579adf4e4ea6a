"""A record for fine-tuning to one form: a conversation.

In: a row as a mapping, as JSONL, CSV, Parquet or Arrow give it. Out: a `Conversation` of plain JSON data. Forms, by the
keys that a row has (null counts as absent), first match wins:

    messages | conversations     [{role, content}…] or [{from, value}…]; system and tools beside them
    instruction (input)          -> response | output | answer | completion
    task, input                  -> output | response | answer; an input or output that isn't text is written as JSON
    prompt | question            -> completion | response | output | answer; both may be lists of messages
    text                         plain text

What can't be one raises `BadRowError` with a reason that says why. Costs one pass over the row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, nearest_first
from penstock.sources.rows import BadRowError

__all__ = ["FIELDS", "Conversation", "conversation_of", "parse_field_map"]

MESSAGES = ("messages", "conversations")
ANSWERS = ("response", "output", "completion", "answer")
FIELDS = (*MESSAGES, "system", "tools", "instruction", "task", "input", "prompt", "question", *ANSWERS, "text")
"""Every column that is read; the targets of a field map."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "ipython",
}
"""Roles met in published data, and what templates call them."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
LARGEST_RECORD = 8 * 2**20
DEEPEST_NESTING = 32


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A record in one form.

    Attributes:
        messages: objects with `role` and `content`, as templates take them; empty for plain text.
        learnt: for each message, whether the model should learn to say it.
        tools: what the assistant may call, as JSON schemas.
        text: plain text; None for a conversation.
        size: characters in all.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str | None = None
    size: int = 0


def parse_field_map(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`response=answer` words to (target, column) pairs.

    Raises:
        ConfigError: a word isn't TARGET=COLUMN, a target is unknown or given twice.
    """
    pairs: dict[str, str] = {}
    for word in words:
        target, separator, column = word.partition("=")
        if not separator or not column:
            raise ConfigError(
                f"field map {word!r} isn't TARGET=COLUMN", hint="for instance --field-map response=answer"
            )
        if target not in FIELDS:
            raise ConfigError(
                f"field map target {target!r} isn't known", hint=f"known: {nearest_first(target, FIELDS)}"
            )
        if pairs.setdefault(target, column) != column:
            raise ConfigError(
                f"field map target {target!r} is given twice: {pairs[target]!r} and {column!r}", hint="keep one of them"
            )
    return tuple(sorted(pairs.items()))


def conversation_of(row: Mapping[str, Any], field_map: Mapping[str, str] | None = None) -> Conversation:
    """The conversation that a row spells.

    Raises:
        BadRowError: `no-record`, `bad-message`, `unknown-role`, `not-text`, `empty`, `too-long`, `too-deep`,
            `bad-unicode`.
    """
    if not isinstance(row, Mapping):
        raise BadRowError("no-record", f"a row is an object, this one is {type(row).__name__}")
    mapped = field_map or {}
    taken = set(mapped.values())  # a column that was given another meaning no longer has that of its own name
    names = [name for name in FIELDS if name in mapped or name not in taken]
    names.sort(key=lambda name: name not in mapped)  # a form whose field was mapped was asked for: it comes first
    record = {name: value for name in names if (value := row.get(mapped.get(name, name))) is not None}
    conversation = _of_form(record)
    size = _checked_size([conversation.messages, conversation.tools, conversation.text])
    return Conversation(
        messages=conversation.messages,
        learnt=conversation.learnt,
        tools=conversation.tools,
        text=conversation.text,
        size=size,
    )


def _of_form(record: dict[str, Any]) -> Conversation:
    answer = next((value for name, value in record.items() if name in ANSWERS), None)
    for name, value in record.items():
        if name in MESSAGES:
            return _chat(record, _messages(value))
        if name == "text":
            return _plain(value)
        if answer is None:
            continue
        if name == "instruction" or (name == "task" and "input" in record):
            return _exchange(record, instruction=_text(value, name), answer=answer)
        if name in ("prompt", "question"):
            return _prompted(record, value, answer)
    raise BadRowError(
        "no-record",
        f"none of messages, instruction, task, prompt and text; it has {sorted(record) or 'no known field'}",
    )


def _plain(text: Any) -> Conversation:
    if not isinstance(text, str):
        raise BadRowError("not-text", f"text is {type(text).__name__}")
    if not text:
        raise BadRowError("empty", "text is empty")
    return Conversation(text=text)


def _chat(record: dict[str, Any], messages: list[dict[str, Any]]) -> Conversation:
    if "system" in record and messages and messages[0]["role"] != "system":
        system = _text(record["system"], "system")
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    learnt = [message["role"] == "assistant" and message.pop("weight", 1) != 0 for message in messages]
    for message in messages:
        message.pop("weight", None)
        if message["role"] == "assistant" and not _says_something(message):
            raise BadRowError("empty", "an assistant's message has neither content nor tool calls")
    if not messages:
        raise BadRowError("empty", "no messages")
    return Conversation(messages=messages, learnt=learnt, tools=_tools(record.get("tools")))


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or bool((message.get("content") or "").strip())


def _exchange(record: dict[str, Any], *, instruction: str, answer: Any) -> Conversation:
    given = _text_or_json(record.get("input", ""))
    user: dict[str, Any] = {"role": "user", "content": f"{instruction}\n\n{given}" if given.strip() else instruction}
    # Templates made for this form (alpaca) show the two apart; the others see `content`.
    user |= {"instruction": instruction, "input": given}
    if not user["content"].strip():
        raise BadRowError("empty", "instruction and input are empty")
    return _chat(record, [user, {"role": "assistant", "content": _text_or_json(answer)}])


def _prompted(record: dict[str, Any], prompt: Any, answer: Any) -> Conversation:
    if isinstance(prompt, list) or isinstance(answer, list):
        context = _messages(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
        said = _messages(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])
        return _chat(record, [*({**message, "weight": 0} for message in context), *said])
    user = {"role": "user", "content": _text(prompt, "prompt")}
    return _chat(record, [user, {"role": "assistant", "content": _text_or_json(answer)}])


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):  # a CSV cell holds the list as JSON
        value = _parsed(value, "messages")
    if not isinstance(value, list):
        raise BadRowError("bad-message", f"messages are {type(value).__name__}, expected a list")
    return [_message(item) for item in value]


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise BadRowError("bad-message", f"a message is {type(item).__name__}, expected an object")
    role = item.get("role", item.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRowError("unknown-role", f"role {role!r:.80}; known: {', '.join(ROLES)}")
    # Tables give every message every column, null where it has none: the same message in JSONL lacks them.
    message = {
        key: _plain_data(value)
        for key, value in item.items()
        if value is not None and isinstance(key, str) and key not in ("role", "from", "content", "value")
    }
    content = item.get("content", item.get("value"))
    if content is None and not message.get("tool_calls"):
        raise BadRowError("bad-message", "a message has no content")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_without_nulls(call) for call in message["tool_calls"]]
    return {"role": ROLES[role.lower()], "content": _content(content), **message}


def _without_nulls(call: Any) -> Any:
    """A tool call without its null columns; its arguments as they are, where null may be meant."""
    if not isinstance(call, dict):
        return call
    present = {key: value for key, value in call.items() if value is not None}
    if isinstance(present.get("function"), dict):
        present["function"] = {key: value for key, value in present["function"].items() if value is not None}
    return present


def _content(content: Any) -> str | None:
    """A message's content as one string; text blocks are joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRowError("not-text", f"content is {type(content).__name__}")
    texts = []
    for block in content:
        text = block.get("text") if isinstance(block, Mapping) and block.get("type", "text") == "text" else block
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise BadRowError("not-text", f"content has a block of kind {kind!r:.80}")
        texts.append(text)
    return "".join(texts)


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else None
    if value is not None and not isinstance(value, list):
        raise BadRowError("bad-message", f"tools are {type(value).__name__}, expected a list")
    return _plain_data(value) or None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("not-text", f"{name} is {type(value).__name__}")
    return value


def _text_or_json(value: Any) -> str:
    """Text as it is; anything else as JSON with sorted keys, which the order of columns in a table can't change."""
    if isinstance(value, str):
        return value
    return json.dumps(_plain_data(value), ensure_ascii=False, indent=2, sort_keys=True, allow_nan=False)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError("bad-message", f"{name} is text, but no JSON ({error})") from None


def _plain_data(value: Any, depth: int = 0) -> Any:
    """JSON data and nothing else: what templates see has no methods of its own."""
    if value is None or type(value) in (str, bool, int):
        return value
    if depth > DEEPEST_NESTING:
        raise BadRowError("too-deep", f"nested more than {DEEPEST_NESTING} deep")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRowError("not-text", f"the number {value} isn't JSON")
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item, depth + 1) for item in value]
    raise BadRowError("not-text", f"a value is {type(value).__name__}, which isn't JSON")


def _checked_size(value: Any) -> int:
    """Characters in all strings and keys, each valid Unicode."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
            if not item.isascii() and LONE_SURROGATE.search(item):
                raise BadRowError("bad-unicode", "a string has a lone surrogate")
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
        if size > LARGEST_RECORD:
            raise BadRowError("too-long", f"more than {LARGEST_RECORD} characters")
    return size
