"""Documents drawn from a store: by the seed, without repeats, whatever the number asked for."""

from __future__ import annotations

import pytest

from penstock.errors import StoreError
from penstock.load.samples import MOST_LINES, sample_documents
from penstock.store import Store, document_origin, document_text


def test_a_larger_sample_begins_with_the_smaller_one(store: Store) -> None:
    few, more = sample_documents(store, 3), sample_documents(store, 20)
    assert few == more[:3]
    assert len({one["document"] for one in more}) == 20
    assert few != sample_documents(store, 3, seed=1)


def test_a_sample_of_more_than_there_is_holds_every_kept_document_once(store: Store) -> None:
    for split in (None, *store.manifest.splits):
        drawn = [one["document"] for one in sample_documents(store, 10_000, split=split)]
        assert sorted(drawn) == store.kept_documents(split).tolist()
        assert split is None or {document_origin(store, number).split for number in drawn} <= {split}


def test_the_text_is_the_beginning_of_the_document(store: Store) -> None:
    tokenizer = store.tokenizer()
    for one in sample_documents(store, 10_000):
        text = document_text(store, one["document"], tokenizer)
        assert text.startswith(one["text"])
        assert one["is_whole"] == (text == one["text"])
        assert one["text"].count("\n") < MOST_LINES


def test_an_unknown_split_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no split 'dev'"):
        sample_documents(store, 1, split="dev")
