"""Random tokenizers, sensible and not: whichever engine is chosen, ids equal those of `tokenizers`.

A vocabulary that is trained on text hides how an engine reads a tokenizer.json; one of random merges over few
characters shows it. Each seed draws a vocabulary (ids in any order, merges in any order, tokens that no merge makes),
options of the model, a normalizer, pre-tokenizers in any order and added tokens with any flags.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from penstock.errors import TokenizerError
from penstock.tokenize import Tokenizer, TokenizerSpec
from penstock.tokenize.engines import ReferenceEngine
from penstock.tokenize.loading import CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN
from penstock.tokenize.specification import character_of_byte

from . import equality_cases as cases
from .conftest import byte_level, loaded
from .families import DEEPSEEK_PATTERNS, QWEN2_PATTERN, Oracle, split_by

CHARACTERS = list("abcdefgh xyzABC012\n'(.-é汉🙂\t")
PATTERNS = [GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN, QWEN2_PATTERN]
BEHAVIOURS = ["isolated", "isolated", "merged_with_previous", "merged_with_next", "contiguous", "removed"]


def byte_level_step(**options: Any) -> Any:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def drawn_merges(source: random.Random, alphabet: list[str], most: int) -> tuple[list[str], list[tuple[str, str]]]:
    """All tokens (single characters first) and the merges that make the others; then some that no merge makes."""
    tokens, pool = dict.fromkeys(alphabet), list(alphabet)
    merges: dict[tuple[str, str], None] = {}
    for _ in range(source.randrange(most)):
        left, right = source.choice(pool), source.choice(pool)
        merges[left, right] = None
        tokens[left + right] = None
        if len(left + right) < 12:
            pool.append(left + right)
    if source.random() < 0.3:
        tokens.update(dict.fromkeys("".join(source.choices(pool, k=3)) for _ in range(20)))
    order = list(merges)
    if source.random() < 0.3:
        source.shuffle(order)
    return list(tokens), order


def drawn_added_tokens(source: random.Random) -> list[AddedToken]:
    if source.random() < 0.6:
        return []
    has_flags = source.random() < 0.3
    names = ["".join(source.choices(CHARACTERS, k=source.randrange(1, 4))) for _ in range(source.randrange(1, 5))]
    flags = [{name: has_flags and source.random() < 0.3 for name in ("lstrip", "rstrip")} for _ in names]
    return [
        AddedToken(name, normalized=source.random() < 0.5, special=False, **each)
        for name, each in zip(names, flags, strict=True)
    ]


def random_byte_level(seed: int) -> Reference:
    source = random.Random(seed)
    used = [character_of_byte[byte] for text in CHARACTERS for byte in text.encode()]
    tokens, merges = drawn_merges(source, used, 300)
    tokens = list(dict.fromkeys([*tokens, *character_of_byte]))
    ids = list(range(len(tokens)))
    if source.random() < 0.5:
        source.shuffle(ids)
    vocabulary = dict(zip(tokens, ids, strict=True))
    tokenizer = Reference(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=source.random() < 0.3))
    split = pre_tokenizers.Split(
        Regex(source.choice(PATTERNS)), source.choice(BEHAVIOURS), invert=source.random() < 0.1
    )
    tokenizer.pre_tokenizer = source.choice(
        [
            byte_level_step(),
            byte_level_step(add_prefix_space=True),
            byte_level_step(use_regex=False),
            split_by(source.choice(PATTERNS[1:])),
            split_by(*DEEPSEEK_PATTERNS),
            pre_tokenizers.Sequence([split, byte_level_step(use_regex=False)]),
            pre_tokenizers.Sequence([split, byte_level_step()]),
            pre_tokenizers.Sequence([byte_level_step(use_regex=False), split]),
            pre_tokenizers.Sequence([split, byte_level_step(use_regex=False, add_prefix_space=True)]),
        ]
    )
    normalizer = source.choice([None, None, None, normalizers.NFC(), normalizers.Sequence([]), normalizers.NFKC()])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    tokenizer.add_tokens(drawn_added_tokens(source))
    return tokenizer


def random_sentence_piece(seed: int) -> Reference:
    source = random.Random(seed)
    known = [character for character in "▁".join(CHARACTERS).replace(" ", "▁") if source.random() < 0.9]
    tokens, merges = drawn_merges(source, list(dict.fromkeys(known)), 250)
    numbered = [*(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    if source.random() < 0.4:
        source.shuffle(numbered)
    controls = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*controls, *numbered]))}
    flags = {"fuse_unk": source.random() < 0.7, "ignore_merges": source.random() < 0.2}
    tokenizer = Reference(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", **flags))
    underline, prepend = normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")
    chosen = source.choice(
        [[], [underline], [prepend, underline], [underline, prepend], [normalizers.Strip(), underline], [prepend]]
    )
    if chosen:
        tokenizer.normalizer = normalizers.Sequence(chosen)
    scheme, split = source.choice(["first", "always", "never"]), source.random() < 0.5
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    before_words = pre_tokenizers.Split(" ", "merged_with_previous")
    pre_tokenizer = source.choice([None, metaspace, metaspace, before_words, pre_tokenizers.Sequence([metaspace])])
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    tokenizer.add_tokens(drawn_added_tokens(source))
    return tokenizer


def texts_for(tokenizer: Tokenizer, seed: int) -> list[bytes]:
    source = random.Random(seed)
    mixed = CHARACTERS + list(tokenizer.spec.kept_tokens) * 3
    drawn = ["".join(source.choices(CHARACTERS, k=source.randrange(1, 15))) for _ in range(150)]
    drawn += ["".join(source.choices(mixed, k=source.randrange(1, 8))) for _ in range(100)]
    return [text.encode() for text in drawn] + cases.merge_texts(tokenizer, seed, 100) + cases.random_texts(seed, 42)


def has_an_empty_token(tokenizer: Reference) -> bool:
    """Whether the normalizer leaves nothing of an added token: see test_tokenize_vanishing.py."""
    content = json.loads(tokenizer.to_str())
    names = [token["content"] for token in content["added_tokens"] if token["normalized"]]
    return tokenizer.normalizer is not None and "" in map(tokenizer.normalizer.normalize_str, names)


def assert_random_tokenizers_equal(build: Any, seeds: range) -> Counter[str]:
    """How many ran on each engine."""
    engines: Counter[str] = Counter()
    for seed in seeds:
        reference = build(seed)
        never_ends = has_an_empty_token(reference)
        spec = TokenizerSpec.from_json(reference.to_str().encode(), origin=f"seed {seed}", end_token=None)
        tokenizer = Tokenizer(spec, origin=f"seed {seed}")
        try:
            engines[tokenizer.engine.name] += 1
        except TokenizerError:  # its merges spell a control token, or on some texts the reference never ends: rightly
            engines["refused for an empty token" if never_ends else "refused"] += 1
            continue
        assert not never_ends, f"seed {seed}: {tokenizer.engine.reason}"
        texts = texts_for(tokenizer, seed)
        try:
            true_ids, true_offsets = Oracle(tokenizer).encode(texts)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # it can't be imported
                raise
            engines["no reference"] += 1
            if tokenizer.engine.build is ReferenceEngine:
                with pytest.raises(TokenizerError, match="fails on a text"):
                    tokenizer.encode(texts)
            continue
        ids, offsets = tokenizer.encode(texts)
        assert np.array_equal(offsets, true_offsets), f"seed {seed}: {tokenizer.engine.reason}"
        assert np.array_equal(ids, true_ids), f"seed {seed}: {tokenizer.engine.reason}"
    return engines


SEEDS_PER_PROCESS = 500
PROCESS_BYTES = 6 * 2**30  # of which the largest needs an eighth: one that runs away must not take the machine along
KINDS = {"bytes": random_byte_level, "SentencePiece": random_sentence_piece}


def counted_by_engine(kind: str, seeds: range) -> Counter[str]:
    """Many seeds a few hundred a process: gigatoken keeps a megabyte of each tokenizer it ever loaded."""
    if len(seeds) <= SEEDS_PER_PROCESS:
        return assert_random_tokenizers_equal(KINDS[kind], seeds)
    parts = [seeds[first : first + SEEDS_PER_PROCESS] for first in range(0, len(seeds), SEEDS_PER_PROCESS)]
    spawn, engines = multiprocessing.get_context("spawn"), Counter[str]()
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1, initializer=limit_memory) as pool:
        for part in parts:
            try:
                engines += pool.submit(counted_by_engine, kind, part).result()
            except BrokenProcessPool:
                pytest.fail(
                    f"the process of {kind} seeds {part.start} to {part.stop - 1} was ended, or ran out of memory"
                )
    return engines


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (PROCESS_BYTES, PROCESS_BYTES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(1000, 6000), marks=pytest.mark.torture(lane="H"))])
def test_random_tokenizers_give_the_ids_of_the_reference(
    kind: str, seeds: range, torture_figures: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where processes find this module
    engines = counted_by_engine(kind, seeds)
    torture_figures(lane="H", case="random tokenizers", trials=len(seeds), failures=0, random=True, **engines)
    assert engines["gigatoken"] > len(seeds) / 8, "a comparison of the reference with itself shows nothing"
    assert engines["no reference"] < len(seeds) / 20, "nothing to compare with"


SPLIT = pre_tokenizers.Split(Regex(CL100K_PATTERN), "isolated")
REFUSED = {
    "a second pattern": pre_tokenizers.Sequence([SPLIT, byte_level_step()]),
    "bytes before the pattern": pre_tokenizers.Sequence([byte_level_step(use_regex=False), SPLIT]),
    "no pattern": byte_level_step(use_regex=False),
    "matches removed": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CL100K_PATTERN), "removed"), byte_level_step(use_regex=False)]
    ),
}


def test_added_tokens_that_compete_run_on_the_reference():
    """`tokenizers` looks for the normalized ones in what the others left over; gigatoken takes the leftmost."""
    added = [AddedToken("2\n", normalized=True, special=False), AddedToken("\nz", normalized=False, special=False)]
    apart = [AddedToken("2\n", normalized=True, special=False), AddedToken("xz", normalized=False, special=False)]
    engines = []
    for tokens in (added, apart):
        tokenizer = byte_level()
        tokenizer.add_tokens(tokens)
        engines.append(loaded(tokenizer))
    competing, other = engines
    assert (competing.engine.name, other.engine.name) == ("tokenizers", "gigatoken")
    assert np.array_equal(competing.encode([b"12\nzB"])[0], Oracle(competing).encode([b"12\nzB"])[0])


@pytest.mark.parametrize("shape", REFUSED)
def test_what_gigatoken_reads_otherwise_runs_on_the_reference(shape: str):
    """None of these differs on the self-check's texts when nothing merges; each does for some vocabulary."""
    tokenizer = loaded(byte_level(pre_tokenizer=REFUSED[shape]))
    assert tokenizer.engine.name == "tokenizers"
    assert "gigatoken" in tokenizer.engine.reason
