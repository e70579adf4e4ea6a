"""A passage is found wherever a slow reader finds it, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from penstock.errors import ConfigError, DamagedStoreError, StoreError
from penstock.sources import Part, PartKind
from penstock.store import document_origin, document_text, open_store, prepare, searching, token_origin
from penstock.store.searching import find_passage
from penstock.tokenize import Tokenizer, TokenizerSpec

from .samples import OPTIONS, MemorySource, build, contents, document, files, forged_tokens

ALPHABET = "ab \né汉A"


def occurrences(text: bytes, passage: bytes) -> list[int]:
    """The slow reader: looks at every byte."""
    return [at for at in range(len(text) - len(passage) + 1) if text[at : at + len(passage)] == passage]


@pytest.fixture(scope="module")
def texts(mixed) -> list[bytes]:
    with open_store(mixed) as store:
        tokenizer = store.tokenizer()
        return [document_text(store, number, tokenizer).encode() for number in range(store.num_documents)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Documents over a few characters, with merges, so that passages lie across tokens in every way."""
    generator = np.random.default_rng(3)
    documents = [
        document(f"{number:03}", "".join(generator.choice(list(ALPHABET), generator.integers(1, 40))).encode())
        for number in range(50)
    ]
    documents += [
        document("spaces", b" " * 100 + b"ab"),
        document("same", b"abab" * 10),
        document("twin", b"abab" * 10),
    ]
    path = tmp_path_factory.mktemp("mixed") / "store"
    prepare([MemorySource(documents)], path, options=OPTIONS.__class__(unit_bytes=300, vocab_size=400))
    return path


@given(st.text(ALPHABET, min_size=1, max_size=12), st.sampled_from([1, 2, 7, 60, 501, 10**6]), st.booleans())
@settings(max_examples=50)
def test_the_same_as_a_slow_reader(mixed, texts, passage, stretch, ignore_case):
    with open_store(mixed) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "STRETCH_TOKENS", stretch)
        patch.setattr(searching, "STRETCH_BYTES", 1 + stretch // 3)
        patch.setattr(searching, "MOST_PICKED", 0.25 if stretch % 2 else 0.9)
        found = find_passage(store, passage, most=1000, ignore_case=ignore_case)
    fold = bytes.lower if ignore_case else bytes
    places = [occurrences(fold(text), fold(passage.encode())) for text in texts]
    wanted = {number: found for number, found in enumerate(places) if found}
    assert {one.document: one.matches for one in found.shown} == {number: len(at) for number, at in wanted.items()}
    assert (found.found, found.matches) == (len(wanted), sum(map(len, wanted.values())))
    for one in found.shown:
        assert [place.byte_start for place in one.places] == wanted[one.document][: searching.MOST_PLACES]


def test_places_are_the_bytes_of_the_file_and_the_tokens_of_the_store(scratch, corpus):
    prepare([files(corpus)], scratch / "store", options=OPTIONS.__class__(unit_bytes=300, vocab_size=290))
    passage = "naïve 汉字 🙂."
    with open_store(scratch / "store") as store:
        tokenizer = store.tokenizer()
        found = find_passage(store, passage, most=100)
        assert found.found == store.num_documents
        assert sum(found.excluded.values()) == 1
        for one in found.shown:
            data, tokens = Path(one.file).read_bytes(), store.document_tokens(one.document)
            assert one.matches == len(occurrences(data, passage.encode()))
            for place in one.places:
                assert place.exact
                assert data[place.byte_start : place.byte_end] == passage.encode()
                assert place.line == data[: place.byte_start].count(b"\n") + 1
                assert place.context == data.decode().split("\n")[place.line - 1]
                assert passage in tokenizer.decode(tokens[place.first_token : place.last_token + 1])
                assert passage not in tokenizer.decode(tokens[place.first_token + 1 : place.last_token + 1])
                assert passage not in tokenizer.decode(tokens[place.first_token : place.last_token])
                if one.status == "kept":
                    origin = token_origin(store, place.token)
                    assert (origin["document"], origin["index_in_document"]) == (one.document, place.first_token)
                    assert origin["byte_start"] <= place.byte_start < origin["byte_end"]
                else:
                    assert place.token is None


def test_a_split_alone(built):
    with open_store(built) as store:
        whole = find_passage(store, "Document", most=100)
        assert {name: part["documents"] for name, part in whole.splits.items()} == {
            name: part["documents"] for name, part in store.manifest.counts["splits"].items()
        }
        for name in store.manifest.splits:
            part = find_passage(store, "Document", split=name, most=100)
            assert [one.document for one in part.shown] == [one.document for one in whole.shown if one.split == name]
            for one in part.shown:
                for place in one.places if one.status == "kept" else ():
                    assert token_origin(store, place.token, split=name)["document"] == one.document
        with pytest.raises(StoreError, match="nowhere"):
            find_passage(store, "a", split="nowhere")


def test_never_across_two_documents(scratch):
    """Neighbours in the store: the end of one and the beginning of the next spell the passage."""
    build(scratch / "store", MemorySource([document("1", b"one pass"), document("2", b"age two"), document("3", b"x")]))
    with open_store(scratch / "store") as store:
        assert find_passage(store, "passage").found == 0
        assert find_passage(store, "sa").found == 0
        assert find_passage(store, "pass").found == 1


def test_control_tokens_are_found_by_name_but_not_the_end_of_documents(scratch):
    parts = (Part(data=b"<|user|>", kind=PartKind.CONTROL, loss=False), Part(data=b"hello"))
    chat = dataclasses.replace(document("chat", *parts), exact=False)
    build(scratch / "store", MemorySource([chat, document("text", b"spelt <|endoftext|> out")]))
    with open_store(scratch / "store") as store:
        assert [one.key for one in find_passage(store, "<|user|>hello").shown] == ["chat"]
        assert [one.key for one in find_passage(store, "<|endoftext|>").shown] == ["text"]
        [found] = find_passage(store, "hello").shown
        assert [place.exact for place in found.places] == [False]


def test_only_so_many_are_shown_and_all_are_counted(built):
    with open_store(built) as store:
        found = find_passage(store, "Document", most=2)
        assert (len(found.shown), found.found) == (2, store.num_documents)
        assert found.matches == sum(one.matches for one in find_passage(store, "Document", most=100).shown)
        nothing = find_passage(store, "Document", most=0)
        assert (nothing.shown, nothing.found) == ((), store.num_documents)


def test_nothing_to_find_and_nothing_found(built):
    before = contents(built)
    with open_store(built) as store:
        with pytest.raises(ConfigError, match="empty"):
            find_passage(store, "")
        for passage in ("zebra", "x" * 100_000, "\udcff", "\0", "(.*"):
            found = find_passage(store, passage)
            assert (found.found, found.matches, found.shown) == (0, 0, ())
    assert contents(built) == before


def test_progress_ends_at_the_last_token(built):
    told: list[tuple[int, int]] = []
    with open_store(built) as store:
        find_passage(store, "zebra", on_progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (int(store.arrays["length"].sum()),) * 2
    assert told == sorted(told)


def unigram() -> Tokenizer:
    """A vocabulary of pieces with a normalizer: tokens have no bytes of their own, and text comes back changed."""
    reference = Reference(models.Unigram())
    reference.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    reference.pre_tokenizer = pre_tokenizers.Metaspace()
    reference.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    reference.train_from_iterator(["a document says naïve things about number one two three"] * 20, trainer)
    source = json.dumps(json.loads(reference.to_str())).encode()
    return Tokenizer(TokenizerSpec.from_json(source, origin="unigram"), origin="unigram")


def test_vocabularies_without_bytes_find_the_document(scratch):
    documents = [document("one", b"A document says Things"), document("two", b"nothing of the kind, document document")]
    build(scratch / "store", MemorySource(documents), tokenizer=unigram())
    with open_store(scratch / "store") as store:
        assert [document_origin(store, number).exact for number in (0, 1)] == [False, False]
        found = find_passage(store, "document")
        assert not found.exact
        assert {one.key: one.matches for one in found.shown} == {"one": 1, "two": 2}
        for one in found.shown:
            for place in one.places:
                assert not place.exact
                assert (place.byte_start, place.byte_end) == (0, document_origin(store, one.document).byte_end)
                assert (place.first_token, place.last_token) == (0, one.tokens - 1)
        # The text that the tokens stand for is searched, which this vocabulary has in lower case.
        assert find_passage(store, "Things").found == 0
        assert find_passage(store, "Things", ignore_case=True).found == 1
        assert find_passage(store, "document", split="val").found <= 2


def test_ids_beyond_the_vocabulary_are_damage(built):
    forged_tokens(built, lambda tokens: tokens.__setitem__(0, 60_000))
    with open_store(built) as store, pytest.raises(DamagedStoreError, match="60000"):
        find_passage(store, "a")


def test_damaged_tokens_are_found_before_they_are_searched(built):
    path = min((built / "segments").glob("*.tokens"))
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with open_store(built) as store, pytest.raises(DamagedStoreError, match="block"):
        find_passage(store, "zebra")
