"""Tasks of `bench refused`: documents as files, vocabularies of kinds that gigatoken refuses, datasets over both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench.corpus import corpus_documents, evenly_sampled
from penstock.tokenize import load_tokenizer

__all__ = ["make_corpus_and_tokenizers", "map_with_datasets"]

# Training a Unigram vocabulary is slow, and 2 MB of code has all the words it needs.
TRAINING_BYTES = 2_000_000
FILES_PER_FOLDER = 1000
END_TOKEN = "<|endoftext|>"  # noqa: S105  a vocabulary entry, not a password


def make_corpus_and_tokenizers(
    *, inputs: Sequence[str], sample_bytes: int, vocab_size: int, out: str
) -> dict[str, Any]:
    """Writes `OUT/documents/` and a tokenizer.json for each family; says how much there is of it."""
    folder = Path(out)
    documents = list(dict.fromkeys(evenly_sampled(corpus_documents(inputs), sample_bytes)))
    for number, document in enumerate(documents):
        path = folder / "documents" / f"{number // FILES_PER_FOLDER:04}" / f"{number:06}.txt"
        fs.make_folder(path.parent)
        path.write_bytes(document)  # thousands of small files, used up in a minute: no fsync each
    training = [document.decode() for document in evenly_sampled(documents, TRAINING_BYTES)]
    for name, train in (("unigram", _unigram), ("word-piece", _word_piece), ("digits", _digits)):
        fs.write_atomic(folder / f"{name}.json", train(training, vocab_size).encode())
    return {
        "documents": len(documents),
        "megabytes": sum(map(len, documents)) / 1e6,
        "training_megabytes": sum(map(len, training)) / 1e6,
    }


def map_with_datasets(*, inputs: Sequence[str], tokenizer: str, workers: int, out: str) -> dict[str, Any]:
    """Hugging Face datasets over documents in memory: `map` alone, and with the `save_to_disk` after it.

    Apart, because saving with several processes takes about as long for 1 MB as for 8, most of a short run.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer as Reference
    from transformers import PreTrainedTokenizerFast

    texts = [document.decode() for document in corpus_documents(inputs)]
    reference = Reference.from_str(load_tokenizer(tokenizer).spec.encoder_json)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=reference, model_max_length=10**12)  # type: ignore[no-untyped-call]

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], return_attention_mask=False)["input_ids"]}

    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    started = time.perf_counter()
    encoded = Dataset.from_dict({"text": texts}).map(encode, batched=True, num_proc=workers, remove_columns=["text"])
    mapped = time.perf_counter()
    encoded.save_to_disk(out, num_proc=workers)
    saved = time.perf_counter()
    fs.remove_tree(Path(out))
    return {
        "megabytes_per_second": megabytes / (mapped - started),
        "saved_megabytes_per_second": megabytes / (saved - started),
    }


def _unigram(texts: Sequence[str], vocab_size: int) -> str:
    """As T5's and most SentencePiece models: NFKC, runs of spaces as one, words by ▁."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", END_TOKEN],
        unk_token="<unk>",  # noqa: S106  a vocabulary entry
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _word_piece(texts: Sequence[str], vocab_size: int) -> str:
    """As BERT's, uncased."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]", END_TOKEN]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _digits(texts: Sequence[str], vocab_size: int) -> str:
    """As StarCoder's: each digit alone, then GPT-2's pattern."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())
