"""Records of every published form become one conversation; what isn't one is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.sources import BadRowError
from penstock.sources.records.forms import FIELDS, LARGEST_RECORD, conversation_of, parse_field_map

ASKED = {"role": "user", "content": "Q"}
SAID = {"role": "assistant", "content": "A"}


def spoken(row: dict[str, Any], **field_map: str) -> list[tuple[str, str | None]]:
    conversation = conversation_of(row, field_map)
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"messages": json.dumps([ASKED, SAID])},
        {"messages": [{**ASKED, "name": None, "tool_calls": None}, {**SAID, "name": None}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {
            "messages": [
                {"role": "User", "content": [{"type": "text", "text": "Q"}]},
                {"role": "model", "content": ["A"]},
            ]
        },
        {"instruction": "Q", "response": "A"},
        {"instruction": "Q", "input": "", "output": "A"},
        {"instruction": "Q", "input": None, "answer": "A", "messages": None},
        {"prompt": "Q", "completion": "A"},
        {"prompt": "Q", "response": "A"},
        {"question": "Q", "answer": "A"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "completion": "A"},
    ],
)
def test_every_form_says_the_same(row: dict[str, Any]):
    assert spoken(row) == [("user", "Q"), ("assistant", "A")]
    assert conversation_of(row).learnt == [False, True]


def test_instruction_and_input_are_told_apart_and_together():
    message = conversation_of({"instruction": "Add.", "input": "1 2", "output": "3"}).messages[0]
    assert message == {"role": "user", "content": "Add.\n\n1 2", "instruction": "Add.", "input": "1 2"}


def test_task_records_are_written_the_same_whatever_the_order_of_their_columns():
    one = {"task": "sql", "input": {"table": "t", "columns": ["a", "b"]}, "output": {"y": 1, "x": None}}
    other = {"output": {"x": None, "y": 1}, "input": {"columns": ["a", "b"], "table": "t"}, "task": "sql"}
    assert spoken(one) == spoken(other)
    user, assistant = spoken(one)
    assert user[1] == 'sql\n\n{\n  "columns": [\n    "a",\n    "b"\n  ],\n  "table": "t"\n}'
    assert json.loads(assistant[1] or "") == {"x": None, "y": 1}


def test_a_system_prompt_beside_messages_comes_first_unless_there_is_one():
    assert spoken({"messages": [ASKED, SAID], "system": "S"})[0] == ("system", "S")
    inside = {"role": "system", "content": "T"}
    assert spoken({"messages": [inside, ASKED, SAID], "system": "S"})[0] == ("system", "T")
    assert spoken({"instruction": "Q", "output": "A", "system": "S"})[0] == ("system", "S")


def test_weights_and_prompts_say_what_is_not_learnt():
    assert conversation_of({"messages": [ASKED, {**SAID, "weight": 0}, ASKED, {**SAID, "weight": 1}]}).learnt == [
        False,
        False,
        False,
        True,
    ]
    assert conversation_of({"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}).learnt == [False, False, False, True]
    assert all("weight" not in message for message in conversation_of({"messages": [{**SAID, "weight": 1}]}).messages)


def test_tool_calls_keep_their_arguments_and_lose_empty_columns():
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"x": None, "y": 1.5}, "z": None}}
    row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": "[]"}
    message = conversation_of(row).messages[1]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": 1.5}}}
    ]
    assert conversation_of(row).tools is None
    assert conversation_of({**row, "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no-record"),
        ({"foo": "bar"}, "no-record"),
        ({"instruction": "Q"}, "no-record"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "no-record"),
        ({"task": "t", "output": "A"}, "no-record"),
        ([1, 2], "no-record"),
        ({"text": ""}, "empty"),
        ({"text": 5}, "not-text"),
        ({"messages": []}, "empty"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "empty"),
        ({"instruction": "", "input": " ", "output": "A"}, "empty"),
        ({"instruction": "Q", "output": ""}, "empty"),
        ({"messages": 5}, "bad-message"),
        ({"messages": "not json"}, "bad-message"),
        ({"messages": "[" * 100_000}, "bad-message"),
        ({"messages": [5]}, "bad-message"),
        ({"messages": [{"role": "user"}]}, "bad-message"),
        ({"messages": [ASKED, SAID], "tools": 5}, "bad-message"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown-role"),
        ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, "unknown-role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown-role"),
        ({"messages": [{"content": "x"}]}, "unknown-role"),
        ({"messages": [{"role": "user", "content": 5}]}, "not-text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "not-text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not-text"),
        ({"messages": [{"role": "user", "content": "x", "extra": b"bytes"}]}, "not-text"),
        ({"messages": [{"role": "user", "content": "x", "extra": float("nan")}]}, "not-text"),
        ({"instruction": 5, "output": "A"}, "not-text"),
        ({"instruction": "Q", "input": float("inf"), "output": "A"}, "not-text"),
        ({"prompt": {"a": 1}, "completion": "A"}, "not-text"),
        ({"messages": [{"role": "user", "content": "\ud800"}, SAID]}, "bad-unicode"),
        ({"text": "a" * (LARGEST_RECORD + 1)}, "too-long"),
    ],
)
def test_what_is_no_record_has_a_reason(row: Any, reason: str):
    with pytest.raises(BadRowError) as raised:
        conversation_of(row)
    assert raised.value.reason == reason
    assert raised.value.detail


def test_deep_nesting_is_refused():
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadRowError) as raised:
        conversation_of({"messages": [{"role": "user", "content": "x", "extra": deep}]})
    assert raised.value.reason == "too-deep"


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "type", "text", "x"]), inner
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(row=st.dictionaries(st.sampled_from(FIELDS), anything))
def test_odd_types_never_crash(row: dict[str, Any]):
    try:
        conversation = conversation_of(row)
    except BadRowError:
        return
    assert conversation.text is not None or conversation.messages
    assert len(conversation.learnt) == len(conversation.messages)


def test_fields_are_mapped_and_the_form_that_was_mapped_wins():
    row = {"q": "Q", "a": "A", "text": "ignored", "messages": [ASKED]}
    assert spoken(row, instruction="q", response="a") == [("user", "Q"), ("assistant", "A")]
    assert conversation_of({"body": "words", "messages": [ASKED, SAID]}, {"text": "body"}).text == "words"
    # A column that was given another meaning no longer has that of its own name.
    assert spoken({"output": "Q", "response": "A"}, instruction="output") == [("user", "Q"), ("assistant", "A")]
    assert spoken({"instruction": "Q", "response": "no", "answer": "A"}, response="answer")[1] == ("assistant", "A")


def test_field_maps_are_read():
    assert parse_field_map(["response=answer", "instruction=question"]) == (
        ("instruction", "question"),
        ("response", "answer"),
    )
    assert parse_field_map(["text=a=b"]) == (("text", "a=b"),)
    for words in (["response"], ["response="], ["reponse=a"], ["text=a", "text=b"]):
        with pytest.raises(ConfigError) as raised:
            parse_field_map(words)
        assert raised.value.hint
