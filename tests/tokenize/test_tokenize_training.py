"""Training a vocabulary on the corpus itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as ReferenceTokenizer

from penstock.errors import TokenizerError
from penstock.tokenize import Tokenizer, train_tokenizer

from .conftest import END, ids_of, reference_ids


@pytest.fixture(scope="module")
def sample(corpus: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(corpus.rglob("*.py"))][:12]


def test_training_is_deterministic_and_silent(sample: list[bytes], capfd: pytest.CaptureFixture[str]):
    first, second = (train_tokenizer(sample, vocab_size=400) for _ in range(2))
    assert first.spec.source_json == second.spec.source_json
    assert first.digest == second.digest
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    other = train_tokenizer(sample[:6], vocab_size=400)
    assert other.digest != first.digest


@pytest.mark.parametrize("vocab_size", [257, 258, 400])
def test_the_vocabulary_has_the_size_asked_for(sample: list[bytes], vocab_size: int):
    tokenizer = train_tokenizer(sample, vocab_size=vocab_size)
    assert tokenizer.vocab_size == vocab_size
    content = json.loads(tokenizer.spec.source_json)
    ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
    assert sorted(ids) == list(range(vocab_size)), "dense, each id once"
    assert tokenizer.spec.control_tokens == {END: vocab_size - 1}
    assert tokenizer.end_id == vocab_size - 1
    assert tokenizer.spec.keeps_bytes


def test_merges_shorten_the_corpus_and_equal_the_reference(sample: list[bytes]):
    tokenizer = train_tokenizer(sample, vocab_size=400)
    ids = ids_of(tokenizer, sample)
    assert ids == reference_ids(tokenizer)(sample)
    assert sum(map(len, ids)) < 0.7 * sum(map(len, sample))
    # Every id that was learnt is an id that text can become.
    assert [tokenizer.decode(text_ids).encode() for text_ids in ids] == sample


@pytest.mark.parametrize("vocab_size", [-1, 0, 1, 256])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(vocab_size: int):
    with pytest.raises(TokenizerError) as raised:
        train_tokenizer([b"text"], vocab_size=vocab_size)
    assert str(vocab_size) in raised.value.message
    assert "257" in raised.value.hint


@pytest.mark.parametrize(
    "texts", [[b"a"], [b"hello hello hello"], [b"", b"x"], ["é🙂".encode()], [END.encode() * 3], [b" "]]
)
def test_a_tiny_corpus_is_enough(texts: list[bytes]):
    """There may be less to learn than was asked for; what comes out still encodes everything."""
    tokenizer = train_tokenizer(texts, vocab_size=300)
    assert 257 <= tokenizer.vocab_size <= 300
    for text in [*texts, b"something else \xf0\x9f\x99\x82", END.encode()]:
        (ids,) = ids_of(tokenizer, [text])
        assert tokenizer.end_id not in ids
        assert tokenizer.decode(ids).encode() == text


def test_training_runs_no_code_from_the_working_folder(
    sample: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The trainer is a process of its own, often started inside the repository that is being read."""
    for name in ("gigatoken", "penstock", "numpy", "tempfile", "subprocess", "json", "blake3", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(sample[:3], vocab_size=300)
    assert tokenizer.vocab_size == 300
    assert not (tmp_path / "ran").exists()


def test_a_literal_end_token_in_the_corpus_teaches_nothing(sample: list[bytes]):
    plain = train_tokenizer(sample, vocab_size=300)
    spelt = train_tokenizer([text + END.encode() * 500 for text in sample], vocab_size=300)
    learnt = set(spelt.spec.token_bytes) - set(plain.spec.token_bytes)
    assert not any(b"<|" in token or b"|>" in token for token in learnt - {END.encode()})


def test_training_reads_no_more_than_it_needs():
    """The sample is bounded: an endless corpus ends."""
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield b"word " * 200_000

    tokenizer: Tokenizer = train_tokenizer(endless(), vocab_size=260, sample_bytes=2_500_000)
    assert taken == 3
    assert tokenizer.vocab_size == 260


def test_a_corpus_without_further_pairs_gives_the_ids_that_tokenizers_gives():
    texts = [path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    trained = train_tokenizer(texts, vocab_size=32768, control_tokens=["<|im_start|>", "<|im_end|>"])
    assert trained.vocab_size < 32768  # the pairs ran out
    reference = ReferenceTokenizer.from_str(trained.spec.source_json.decode())
    assert trained.vocab_size == reference.get_vocab_size()
    assert len(trained.spec.control_tokens) == 3
    for name, token in trained.spec.control_tokens.items():
        assert (reference.token_to_id(name), reference.id_to_token(token)) == (token, name)
    assert trained.engine.name == "gigatoken"
