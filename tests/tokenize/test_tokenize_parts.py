"""Documents of parts: one encoding per run of text, controls by name, loss by first byte, begin and end tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from penstock.errors import TokenizerError
from penstock.sources import Document, Part, PartKind
from penstock.tokenize import Tokenizer

from .conftest import END, byte_level, ids_of, loaded
from .test_tokenize_engines import word_piece

MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ã", "©"), ("c", "c")]


def chat_tokenizer() -> Tokenizer:
    """Two controls to put between parts, a begin token and an end token put around texts by the tokenizer itself."""
    names = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    reference = byte_level(MERGES, added=[AddedToken(name, special=True, normalized=False) for name in names])
    begin, end = (reference.token_to_id(name) for name in names[:2])
    reference.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    return loaded(reference)


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    return chat_tokenizer()


def document(*parts: Part) -> Document:
    return Document(key=b"k", group=b"k", path=b"k", byte_start=0, byte_end=0, parts=parts)


def slow_reference(tokenizer: Tokenizer, parts: list[Part]) -> tuple[list[int], list[bool]]:
    """Byte by byte: each byte knows its part's loss; a token takes that of its first byte."""
    ids, loss = list(tokenizer.spec.begin_ids), [False] * len(tokenizer.spec.begin_ids)
    run = b""
    run_loss: list[bool] = []

    def close_run() -> None:
        position = 0
        for token in ids_of(tokenizer, [run])[0]:
            ids.append(token)
            loss.append(run_loss[position])
            position += len(tokenizer.spec.token_bytes[token])
        assert position == len(run)

    for part in parts:
        if part.kind is PartKind.TEXT:
            run += part.data
            run_loss += [part.loss] * len(part.data)
        else:
            close_run()
            run, run_loss = b"", []
            ids.append(tokenizer.spec.control_tokens[part.data.decode()])
            loss.append(part.loss)
    close_run()
    return [*ids, tokenizer.end_id], [*loss, True]


def mask_of(runs: np.ndarray | None, size: int, num_begin: int) -> list[bool]:
    if runs is None:  # everything but the begin tokens, which nothing predicts
        return [False] * num_begin + [True] * (size - num_begin)
    mask = np.zeros(size, bool)
    previous_end = -1
    for start, count in runs.tolist():
        assert count > 0
        assert start > previous_end, "runs are in order, apart, and as long as can be"
        mask[start : start + count] = True
        previous_end = start + count
    return mask.tolist()


texts = st.text(st.sampled_from("abc é🙂\n<|>s/"), max_size=8).map(str.encode)
text_parts = st.builds(lambda data, loss: Part(data=data, loss=loss), texts, st.booleans())
control_parts = st.builds(
    lambda name, loss: Part(data=name, kind=PartKind.CONTROL, loss=loss),
    st.sampled_from([b"<|user|>", b"<|assistant|>", b"<s>", b"</s>", END.encode()]),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(text_parts, text_parts, control_parts), max_size=8))
def test_parts_equal_the_slow_reference(chat: Tokenizer, parts: list[Part]):
    ids, runs = chat.encode_document(document(*parts))
    expected_ids, expected_loss = slow_reference(chat, parts)
    assert ids.dtype == np.uint32
    assert ids.tolist() == expected_ids
    assert mask_of(runs, ids.size, len(chat.spec.begin_ids)) == expected_loss
    # None and runs are two forms of one fact; the short one is used whenever it can be.
    assert (runs is None) == all(expected_loss[len(chat.spec.begin_ids) :])


@settings(max_examples=50, deadline=None)
@given(data=texts, cuts=st.lists(st.integers(0, 20), max_size=4))
def test_cutting_a_text_into_parts_does_not_change_its_ids(chat: Tokenizer, data: bytes, cuts: list[int]):
    """Cuts may fall inside a character: a run is encoded as one text."""
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [Part(data=data[start:end]) for start, end in itertools.pairwise(borders)]
    ids, runs = chat.encode_document(document(*parts))
    whole, _ = chat.encode_document(document(Part(data=data)))
    assert ids.tolist() == whole.tolist()
    assert runs is None


def test_begin_and_end_are_those_the_tokenizer_itself_puts_around_a_text(chat: Tokenizer):
    controls = chat.spec.control_tokens
    assert chat.spec.begin_ids == (controls["<s>"],)
    assert chat.end_id == controls["</s>"]
    ids, runs = chat.encode_document(document(Part(data=b"abc")))
    assert (ids.tolist(), runs) == ([controls["<s>"], *ids_of(chat, [b"abc"])[0], controls["</s>"]], None)


def test_the_end_token_carries_loss_even_if_nothing_else_does(chat: Tokenizer):
    ids, runs = chat.encode_document(document(Part(data=b"abc", loss=False)))
    assert runs is not None
    assert runs.tolist() == [[ids.size - 1, 1]]
    empty, empty_runs = chat.encode_document(document())
    assert (empty.tolist(), empty_runs) == ([*chat.spec.begin_ids, chat.end_id], None)


def test_a_control_spelt_in_text_stays_text_and_a_control_part_becomes_one_id(chat: Tokenizer):
    spelt, _ = chat.encode_document(document(Part(data=b"<|user|></s><s>")))
    assert not set(spelt[1:-1].tolist()) & set(chat.spec.control_tokens.values())
    control, _ = chat.encode_document(document(Part(data=b"<|user|>", kind=PartKind.CONTROL)))
    assert control[1:-1].tolist() == [chat.spec.control_tokens["<|user|>"]]


def test_an_unknown_control_is_refused_with_the_nearest_name_first(chat: Tokenizer):
    with pytest.raises(TokenizerError) as raised:
        chat.encode_document(document(Part(data=b"<|asistant|>", kind=PartKind.CONTROL)))
    assert "<|asistant|>" in raised.value.message
    listed = raised.value.hint.partition(":")[2].strip().split(", ")
    assert listed[0] == "<|assistant|>"
    assert set(listed) == set(chat.spec.control_tokens)


def test_loss_inside_a_run_needs_exact_bytes():
    tokenizer = loaded(word_piece())
    parts = [Part(data=b"hello "), Part(data=b"hello", loss=False)]
    with pytest.raises(TokenizerError, match="byte-level"):
        tokenizer.encode_document(document(*parts))
    between = Part(data=END.encode(), kind=PartKind.CONTROL, loss=False)
    ids, runs = tokenizer.encode_document(document(parts[0], between, parts[1]))
    hello = ids_of(tokenizer, [b"hello"])[0]
    assert ids.tolist() == [*hello, tokenizer.end_id, *hello, tokenizer.end_id]
    assert runs is not None
    assert mask_of(runs, ids.size, 0) == [True, False, False, True]
    # An empty part has no bytes that could carry anything.
    ids, runs = tokenizer.encode_document(document(parts[0], Part(data=b"", loss=False)))
    assert (ids.tolist(), runs) == ([*hello, tokenizer.end_id], None)
