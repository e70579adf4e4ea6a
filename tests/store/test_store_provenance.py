"""From every token back to the bytes of its file, and the errors a user of a store can meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError, InputError, NotAStoreError, StoreError
from penstock.sources import FilesSource, sources_from_inputs
from penstock.store import (
    document_origin,
    document_text,
    list_versions,
    open_store,
    prepare,
    summary,
    token_origin,
    verify,
)

from .samples import GOLDEN_FILES, OPTIONS, MemorySource, build, contents, document, files


@pytest.fixture
def trained(scratch, corpus) -> Path:
    """A store with a vocabulary of merges, so that tokens are of several bytes and cut characters in two."""
    prepare([files(corpus)], scratch / "trained", options=OPTIONS.__class__(unit_bytes=300, vocab_size=290))
    return scratch / "trained"


@pytest.mark.parametrize("kind", ["built", "trained"])
def test_every_token_leads_to_its_bytes(request, corpus, kind):
    path = request.getfixturevalue(kind)
    with open_store(path) as store:
        tokenizer = store.tokenizer()
        kept = store.kept_documents().tolist()
        token = 0
        for number in kept:
            origin = document_origin(store, number)
            data = Path(origin.file).read_bytes()
            tokens = store.document_tokens(number).tolist()
            assert origin.key == f"corpus/{Path(origin.file).relative_to(corpus)}"
            assert (origin.byte_start, origin.byte_end, origin.status) == (0, len(data), "kept")
            assert origin.tokens == len(tokens)
            assert document_text(store, number, tokenizer).encode() == data
            position = 0
            for within, token_id in enumerate(tokens):
                found = token_origin(store, token)
                assert (found["token"], found["document"], found["index_in_document"]) == (token, number, within)
                assert (found["id"], found["file"], found["exact"]) == (token_id, origin.file, True)
                assert found["byte_start"] == position
                position = found["byte_end"]
                is_end = within == len(tokens) - 1
                piece = data[found["byte_start"] : found["byte_end"]]
                assert piece == (b"" if is_end else tokenizer.spec.token_bytes[token_id])
                token += 1
            assert position == len(data)
        assert token == store.manifest.counts["tokens"]


def test_tokens_are_numbered_within_a_split(built):
    with open_store(built) as store:
        total = 0
        for name in store.manifest.splits:
            count = store.manifest.counts["splits"][name]["tokens"]
            first, last = token_origin(store, 0, split=name), token_origin(store, count - 1, split=name)
            assert {first["split"], last["split"]} == {name}
            assert first["document"] == store.kept_documents(name)[0]
            assert last["document"] == store.kept_documents(name)[-1]
            total += count
            with pytest.raises(StoreError, match=name):
                token_origin(store, count, split=name)
        assert total == store.manifest.counts["tokens"]


def test_numbers_that_nothing_has(built):
    with open_store(built) as store:
        tokenizer = store.tokenizer()
        total = store.manifest.counts["tokens"]
        for number in (-1, total, 2**40):
            with pytest.raises(StoreError, match=str(number)) as caught:
                token_origin(store, number)
            assert str(total - 1) in caught.value.hint
        for number in (-1, store.num_documents, 2**40):
            for question in (
                lambda number: document_origin(store, number),
                lambda number: document_text(store, number, tokenizer),
                store.document_tokens,
            ):
                with pytest.raises(StoreError, match=str(number)) as caught:
                    question(number)
                assert str(store.num_documents - 1) in caught.value.hint
        with pytest.raises(StoreError, match="nowhere") as caught:
            token_origin(store, 0, split="nowhere")
        assert "train, val, test" in caught.value.hint


def test_excluded_documents_say_so(built):
    with open_store(built) as store:
        states = {document_origin(store, number).key: document_origin(store, number) for number in range(11)}
    one, other = states["corpus/copy.txt"], states["corpus/part0/3.txt"]
    assert {one.status, other.status} == {"kept", "copy-across-splits"}
    assert one.split != other.split


def test_a_source_that_is_one_file(scratch, corpus):
    [source] = sources_from_inputs([str(corpus / "part0" / "3.txt")])
    build(scratch / "store", source)
    with open_store(scratch / "store") as store:
        origin = document_origin(store, 0)
        assert (origin.key, origin.file) == ("3.txt", str(corpus / "part0" / "3.txt"))
        assert document_text(store, 0, store.tokenizer()) == (corpus / "part0" / "3.txt").read_text()


def test_names_that_are_no_text_come_back_printable(scratch):
    folder = scratch / "odd"
    folder.mkdir()
    (Path(bytes(folder).decode()) / "a\nb\x1b[31m.txt").write_text("odd")
    build(scratch / "store", files(folder))
    with open_store(scratch / "store") as store:
        origin = document_origin(store, 0)
    assert origin.key.isprintable()
    assert origin.file.isprintable()


def test_the_summary_says_what_the_manifest_says(built):
    with open_store(built) as store:
        facts = summary(store)
    assert (facts["digest"], facts["version"], facts["documents"]) == (GOLDEN_FILES, 1, 10)
    assert facts["tokens"] == sum(split["tokens"] for split in facts["splits"].values())
    assert facts["documents"] == sum(split["documents"] for split in facts["splits"].values())
    assert facts["bytes"] == sum(split["bytes"] for split in facts["splits"].values())
    assert facts["found"] == facts["documents"] + sum(facts["skipped"].values())
    assert facts["skipped_examples"]["binary"] == ["corpus/picture.bin"]


# Errors


def test_an_output_that_is_a_file(scratch, corpus):
    (scratch / "out").write_text("mine")
    with pytest.raises(NotAStoreError, match="out"):
        build(scratch / "out", files(corpus))
    assert (scratch / "out").read_text() == "mine"


@pytest.mark.parametrize(
    "theirs",
    [
        ["notes.txt"],
        ["manifests/deployment.yaml", "README"],
        ["segments/a.tokens"],
    ],
)
def test_an_output_with_other_things_in_it_is_left_alone(scratch, corpus, theirs):
    for name in theirs:
        (scratch / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / "out" / name).write_text("mine")
    with pytest.raises(NotAStoreError, match="other things") as caught:
        build(scratch / "out", files(corpus))
    assert caught.value.hint
    assert contents(scratch / "out") == dict.fromkeys(theirs, b"mine")


def test_files_of_others_survive_where_a_killed_first_build_might_have_been(scratch, corpus):
    """Only names of ours at the top, so it may be a store without a commit: what isn't ours inside stays."""
    theirs = ["manifests/deployment.yaml", "work/thesis.tex", "segments/list.txt", "index/a"]
    for name in theirs:
        (scratch / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / "out" / name).write_text("mine")
    assert build(scratch / "out", files(corpus)).manifest.digest == GOLDEN_FILES
    found = contents(scratch / "out")
    assert {name: found.get(name) for name in theirs} == dict.fromkeys(theirs, b"mine")


def test_files_of_others_in_a_store_survive_an_update(built, updated_corpus):
    theirs = ["README", "work/notes.txt", "segments/list.txt", "index/old/a.array", "tokenizers/mine/tokenizer.json"]
    for name in theirs:
        (built / name).parent.mkdir(exist_ok=True)
        (built / name).write_text("mine")
    build(built, files(updated_corpus))
    assert [(built / name).read_text() for name in theirs] == ["mine"] * len(theirs)


def test_an_empty_folder_as_output_is_fine(scratch, corpus):
    (scratch / "out").mkdir()
    assert build(scratch / "out", files(corpus)).manifest.digest == GOLDEN_FILES


def test_input_without_documents(scratch):
    empty, useless = scratch / "empty", scratch / "useless"
    empty.mkdir()
    useless.mkdir()
    (useless / "picture.bin").write_bytes(b"\0\1\2")
    (useless / "empty").write_bytes(b"")
    (useless / ".hidden").write_bytes(b"hidden")
    for folder, reasons in ((empty, []), (useless, ["1 binary", "1 empty", "1 hidden"])):
        with pytest.raises(InputError, match=str(folder)) as caught:
            build(scratch / "out", files(folder))
        assert all(reason in caught.value.message for reason in reasons)
        assert caught.value.hint
        assert not (scratch / "out").exists()
    with pytest.raises(InputError):
        build(scratch / "out", MemorySource([]))
    assert not (scratch / "out").exists()


def test_input_without_documents_leaves_an_existing_store_alone(built, scratch):
    before = {name: data for name, data in contents(built).items() if not name.startswith("work/")}
    (scratch / "useless").mkdir()
    (scratch / "useless" / "picture.bin").write_bytes(b"\0\1\2")
    with pytest.raises(InputError):
        build(built, FilesSource(name="corpus", root=str(scratch / "useless")))
    assert {name: data for name, data in contents(built).items() if not name.startswith("work/")} == before
    assert list_versions(built) == [1]
    assert verify(built) == []


def test_two_documents_of_one_key(scratch):
    with pytest.raises(InputError, match="same-key"):
        build(scratch / "out", MemorySource([document("same-key", b"one"), document("same-key", b"two")]))
    assert not (scratch / "out").exists()


@pytest.mark.parametrize("dedup", ["nearly", "Exact", "", "none"])
def test_an_unknown_dedup(scratch, corpus, dedup):
    with pytest.raises(ConfigError, match="dedup") as caught:
        build(scratch / "out", files(corpus), dedup=dedup)
    assert "exact" in caught.value.hint
    assert not (scratch / "out").exists()


def test_paths_that_are_no_store(scratch, corpus):
    (scratch / "file").write_text("mine")
    for path in (scratch / "absent", corpus, scratch / "file"):
        with pytest.raises(NotAStoreError):
            open_store(path)
        with pytest.raises(NotAStoreError):
            verify(path)


def test_only_names_of_ours_are_versions(built):
    for name in (
        "1.json",
        "0000001.json",
        "000002.json.bak",
        "٠٠٠٠٠٢.json",
        "²²²²²².json",
        "notes.json",
        "-00002.json",
    ):
        (built / "manifests" / name).write_text("mine")
    assert list_versions(built) == [1]
    assert verify(built) == []
    with pytest.raises(NotAStoreError):
        open_store(f"{built}@²")


def test_a_path_with_an_at_sign_is_a_path_first(scratch, corpus):
    build(scratch / "data@2", files(corpus))
    with open_store(scratch / "data@2") as store:
        assert (store.path, store.version) == (scratch / "data@2", 1)
    with open_store(f"{scratch / 'data@2'}@1") as store:
        assert store.digest == GOLDEN_FILES
