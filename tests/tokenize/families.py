"""One tokenizer of each family people use: its published way of splitting and normalising, over a real vocabulary where
one is at hand, otherwise over a small one trained here in a moment, once per process.

`Oracle` is what each is compared with: `tokenizers` over the same file with the same tokens dropped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Reference

from penstock.tokenize import Tokenizer, TokenizerSpec, load_tokenizer
from penstock.tokenize.loading import CL100K_PATTERN

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)

SENTENCES = [
    "The quick brown fox doesn't jump over the lazy dog; it's 1234567 metres, they're told.",
    "今天天气很好，我们去公园散步吧！汉字测试，中文标点。",
    "日本語のテキストを分割します。カタカナとひらがな、漢字。",
    "한국어 문장을 나누는 시험입니다. 오늘 날씨가 좋네요.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το σκυλί.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣٤٥",
    "השועל החום המהיר קופץ מעל הכלב העצלן",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है १२३",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "naïve café Ångström Œuvre straße İstanbul e\u0301te\u0301",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ “quoted” — dash… ½ ² Ⅻ",
]


def training_texts() -> list[str]:
    """Python's own modules and sentences in many scripts, words shuffled so that there is something to count."""
    modules = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    code = [path.read_text(errors="ignore") for path in modules if 2000 < path.stat().st_size < 30_000][:14]
    source = random.Random(7)
    words = [word for sentence in SENTENCES for word in sentence.split(" ")]
    mixed = [" ".join(source.choices(words, k=12)) + "\n" for _ in range(500)]
    return code + SENTENCES * 10 + mixed


def split_by(*patterns: str) -> Any:
    """The published patterns, then bytes."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(tokenizer: Reference, trainer: Any) -> Reference:
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


def byte_bpe(
    pre_tokenizer: Any,
    *,
    controls: Sequence[str] = ("<|endoftext|>",),
    first: Sequence[str] = (),
    normalizer: Any = None,
    **model: Any,
) -> Reference:
    """A byte-level vocabulary of 2,000 ids; `first` are controls with the lowest ids, `controls` follow the model."""
    learner = Reference(models.BPE())
    learner.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": 2000, "initial_alphabet": sorted(alphabet), "show_progress": False}
    content = json.loads(trained(learner, trainers.BpeTrainer(special_tokens=list(first), **settings)).to_str())
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    tokenizer = Reference(models.BPE(vocab=content["model"]["vocab"], merges=merges, **model))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    names = [*first, *controls]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def llama3() -> Reference:
    controls = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_bpe(split_by(CL100K_PATTERN), controls=controls, ignore_merges=True)
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    return tokenizer


def qwen2() -> Reference:
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return byte_bpe(split_by(QWEN2_PATTERN), controls=controls, normalizer=normalizers.NFC())


def roberta() -> Reference:
    first = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), first=first, controls=[])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def gpt_neox() -> Reference:
    first = ["<|endoftext|>", "<|padding|>"]
    tokenizer = byte_bpe(
        pre_tokenizers.ByteLevel(add_prefix_space=False), first=first, controls=[], normalizer=normalizers.NFC()
    )
    runs = [AddedToken(" " * length, normalized=True, special=False) for length in range(24, 1, -1)]
    tokenizer.add_tokens(runs)
    return tokenizer


def starcoder() -> Reference:
    digits = pre_tokenizers.Digits(individual_digits=True)
    splitter = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return byte_bpe(splitter, first=["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"], controls=[])


def falcon() -> Reference:
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
    return byte_bpe(splitter, first=[">>TITLE<<", "<|endoftext|>"], controls=[])


def deepseek() -> Reference:
    controls = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    return byte_bpe(split_by(*DEEPSEEK_PATTERNS), controls=controls, normalizer=normalizers.Sequence([]))


def sentence_piece_bpe(*, normalizer: Any, pre_tokenizer: Any) -> Reference:
    """Characters and words over ▁, and a token for each byte of what isn't known."""
    learner = Reference(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trained(learner, trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    model = json.loads(learner.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Reference(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in pieces[:3]])
    return tokenizer


def llama2() -> Reference:
    """As written by newer converters; the older ones do the same with a normalizer, see `llama2_legacy`."""
    return sentence_piece_bpe(
        normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    )


def llama2_legacy() -> Reference:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return sentence_piece_bpe(normalizer=normalizer, pre_tokenizer=None)


def gemma() -> Reference:
    return sentence_piece_bpe(
        normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")
    )


def bert() -> Reference:
    tokenizer = Reference(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained(tokenizer, trainers.WordPieceTrainer(vocab_size=1500, special_tokens=names, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def t5() -> Reference:
    tokenizer = Reference(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    settings = {"vocab_size": 1200, "special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    return trained(tokenizer, trainers.UnigramTrainer(**settings, show_progress=False))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tokenizer by name: a published file or something built here, and the engine that has to run it."""

    engine: str
    file: str = ""
    build: Callable[[], Reference] | None = None


FAMILIES = {
    "GPT-2": Family(engine="gigatoken", file="gpt2.tokenizer.json"),
    "r50k": Family(engine="gigatoken", file="r50k_base.tiktoken"),
    "cl100k": Family(engine="gigatoken", file="cl100k_base.tiktoken"),
    "o200k": Family(engine="gigatoken", file="o200k_base.tiktoken"),
    "Llama-3": Family(engine="gigatoken", build=llama3),
    "Qwen2": Family(engine="gigatoken", build=qwen2),
    "RoBERTa": Family(engine="gigatoken", build=roberta),
    "GPT-NeoX": Family(engine="gigatoken", build=gpt_neox),
    "DeepSeek-V3": Family(engine="gigatoken", build=deepseek),
    "StarCoder": Family(engine="tokenizers", build=starcoder),
    "Falcon": Family(engine="tokenizers", build=falcon),
    "Llama-2": Family(engine="gigatoken", build=llama2),
    "Llama-2, legacy": Family(engine="gigatoken", build=llama2_legacy),
    "Gemma": Family(engine="gigatoken", build=gemma),
    "BERT": Family(engine="tokenizers", build=bert),
    "T5": Family(engine="tokenizers", build=t5),
}
BUILT_HERE = [name for name, family in FAMILIES.items() if family.build]


@cache
def built(name: str) -> Tokenizer:
    build = FAMILIES[name].build
    assert build is not None
    spec = TokenizerSpec.from_json(build().to_str().encode(), origin=f"{name}-like")
    return Tokenizer(spec, origin=f"{name}-like")


@cache
def published(path: Path) -> Tokenizer:
    return load_tokenizer(str(path))


UNSPELT = "\uffff\ufffe" * 8  # no text of the suite has it


class Oracle:
    """`tokenizers` over the same file, with the same tokens dropped: read from the file, not from our encoder.

    It numbers added tokens anew once some are dropped, so ids are looked up by token in the file.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.spec.source_json)
        controls, vocabulary, added = tokenizer.spec.control_tokens, content["model"]["vocab"], content["added_tokens"]
        if isinstance(vocabulary, list):  # Unigram: it would find a control's piece wherever text spells it
            vocabulary = [[f"{UNSPELT}{piece}" if piece in controls else piece, score] for piece, score in vocabulary]
            content["model"]["vocab"] = vocabulary
        pieces = vocabulary if isinstance(vocabulary, dict) else {piece: n for n, (piece, _) in enumerate(vocabulary)}
        meant = {**pieces, **{token["content"]: token["id"] for token in added}}
        content["added_tokens"] = [token for token in added if token["content"] not in controls]
        content["post_processor"] = None
        self._reference = Reference.from_str(json.dumps(content))
        given = self._reference.get_vocab(with_added_tokens=True)
        self._meant = np.zeros(1 + max(given.values()), np.uint32)
        for token, number in given.items():
            self._meant[number] = meant[token]

    def encode(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Flat ids and the borders between the texts."""
        encodings = self._reference.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids], dtype=np.int64)])
        flat = np.fromiter((number for each in ids for number in each), np.uint32, count=int(offsets[-1]))
        return self._meant[flat], offsets
