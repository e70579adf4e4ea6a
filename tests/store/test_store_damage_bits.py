"""Accidents, counted (torture C): every bit, every truncation, random flips. All of them are found, by `verify` and by
whoever reads first."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import DamagedStoreError
from penstock.load import Loader
from penstock.pack import plan_concat
from penstock.store import open_store, verify
from penstock.store.layout import BLOCK_BYTES, SegmentEntry

from .damage import (
    MANIFEST,
    Committed,
    flipped,
    lengths_to_cut,
    replaced,
    write_large_store,
    write_tiny_store,
)

Scale = Callable[..., int]
Figures = Callable[..., None]

pytestmark = pytest.mark.torture(lane="C")


@pytest.fixture
def tiny(scratch: Path) -> Committed:
    return Committed(write_tiny_store(scratch / "tiny"))


@pytest.fixture
def large(scratch: Path) -> Committed:
    store = Committed(write_large_store(scratch / "large"))
    assert len(store.manifest.segments) == 4
    assert all(entry.bytes > 2 * BLOCK_BYTES for entry in store.manifest.segments)
    return store


class Count:
    """Trials, and those that somebody missed."""

    def __init__(self) -> None:
        self.trials = 0
        self.missed: list[str] = []

    def add(self, found: bool, what: str) -> None:
        self.trials += 1
        if not found:
            self.missed.append(what)

    def tell(self, figures: Figures, case: str, **more: Any) -> None:
        figures(
            lane="C",
            case=case,
            trials=self.trials,
            failures=len(self.missed),
            found=self.trials - len(self.missed),
            **more,
        )
        assert self.trials
        assert self.missed == []


def sampled(places: list[Any], count: int, seed: str) -> list[Any]:
    """All of them, or `count` drawn with both ends."""
    if count >= len(places):
        return places
    return [places[0], *random.Random(seed).sample(places[1:-1], max(count - 2, 0)), places[-1]]


def test_every_bit_of_every_small_file(tiny: Committed, scale: Scale, torture_figures: Figures):
    """Manifest, index arrays, table, tokenizer, block checksums and the tokens themselves."""
    by_verify, by_reader = Count(), Count()
    for name in tiny.files:
        bits = [(at, bit) for at in range((tiny.path / name).stat().st_size) for bit in range(8)]
        for at, bit in sampled(bits, scale(test=40, torture=10**9), name):
            with flipped(tiny.path / name, at, bit):
                by_verify.add(tiny.found_by_verify(name), f"{name} byte {at} bit {bit}")
                by_reader.add(tiny.found_by_reader(name), f"{name} byte {at} bit {bit}")
    assert verify(tiny.path) == []
    by_verify.tell(torture_figures, "every bit of every file of a small store, by verify")
    by_reader.tell(torture_figures, "every bit of every file of a small store, on opening or first touch")


def test_every_truncation_and_growth(tiny: Committed, large: Committed, scale: Scale, torture_figures: Figures):
    by_verify, by_reader = Count(), Count()
    for store in (tiny, large):
        for name in store.files:
            whole = (store.path / name).read_bytes()
            lengths = sampled(lengths_to_cut(len(whole)), scale(test=6, torture=10**9), name)
            grown = [whole + more for more in (b"\0", b"\n", whole[-1:], whole[:7], bytes(4096), whole)]
            for content in [*(whole[:length] for length in lengths), *grown]:
                if content == whole:
                    continue  # an empty file, "grown" by a part of itself
                with replaced(store.path / name, content):
                    by_verify.add(store.found_by_verify(name), f"{name} of {len(content)} bytes")
                    by_reader.add(store.found_by_reader(name), f"{name} of {len(content)} bytes")
        assert verify(store.path) == []
    by_verify.tell(torture_figures, "every truncation and some growth of every file, by verify")
    by_reader.tell(torture_figures, "every truncation and some growth of every file, on opening")


def random_flips(store: Committed, count: int, seed: int) -> Iterator[tuple[int, SegmentEntry, int, int]]:
    """(segment number, segment, byte, bit) anywhere in the tokens."""
    chance = random.Random(seed)
    segments = list(enumerate(store.manifest.segments))
    for _ in range(count):
        number, entry = chance.choice(segments)
        yield number, entry, chance.randrange(entry.bytes), chance.randrange(8)


def test_random_flips_of_tokens_by_verify(large: Committed, scale: Scale, torture_figures: Figures):
    count = Count()
    for _, entry, at, bit in random_flips(large, scale(test=500, torture=100_000), 1):
        name = f"segments/{entry.name}.tokens"
        with flipped(large.path / name, at, bit):
            count.add(large.found_by_verify(name), f"{name} byte {at} bit {bit}")
    assert verify(large.path) == []
    count.tell(torture_figures, "random bit flips of tokens, by verify")


def test_random_flips_of_tokens_on_first_touch(large: Committed, scale: Scale, torture_figures: Figures):
    """A read of the flipped token is refused; one of its neighbours in other blocks gets what was committed."""
    count, right = Count(), Count()
    whole = {
        entry.name: np.fromfile(large.path / "segments" / f"{entry.name}.tokens", large.manifest.dtype)
        for entry in large.manifest.segments
    }
    block_tokens = BLOCK_BYTES // 2
    for number, entry, at, bit in random_flips(large, scale(test=100, torture=10_000), 2):
        what = f"{entry.name} byte {at} bit {bit}"
        with flipped(large.path / "segments" / f"{entry.name}.tokens", at, bit), open_store(large.path) as opened:
            count.add(is_refused(opened, number, at // 2, 1), what)
            start = (at // 2 // block_tokens + 1) * block_tokens
            if start < entry.tokens:
                length = min(block_tokens, entry.tokens - start)
                given = opened.read(number, start, length)
                right.add(bool((given == whole[entry.name][start : start + length]).all()), what)
    count.tell(torture_figures, "random bit flips of tokens, on first touch by a reader")
    right.tell(torture_figures, "whole blocks beside a flipped one, still read right")


def is_refused(opened: Any, segment: int, offset: int, length: int) -> bool:
    try:
        opened.read(segment, offset, length)
    except DamagedStoreError:
        return True
    return False


@pytest.mark.parametrize("prefetch", [0, None])
def test_a_loader_hands_out_no_wrong_token(large: Committed, prefetch, scale: Scale, torture_figures: Figures):
    """It ends with the error before a row with the flipped token appears; the rows before are right."""
    count, refusals = Count(), 0
    truth = list(batches_of(large.path, prefetch))
    chance = random.Random(3)
    for _ in range(scale(test=5, torture=500)):
        number, entry, at, bit = next(random_flips(large, 1, chance.randrange(2**32)))
        with flipped(large.path / "segments" / f"{entry.name}.tokens", at, bit):
            wrong, refused = 0, False
            try:
                for place, batch in enumerate(batches_of(large.path, prefetch)):
                    wrong += not np.array_equal(batch, truth[place])
            except DamagedStoreError:
                refused = True
        refusals += refused
        in_train = token_is_trained_on(large.path, number, at // 2)
        count.add(wrong == 0 and refused >= in_train, f"{entry.name} byte {at} bit {bit}")
    count.tell(torture_figures, f"random bit flips met by a loader, prefetch {prefetch}", refusals=refusals)
    assert refusals


def batches_of(store: Path, prefetch: int | None) -> Iterator[Any]:
    """The tokens of all batches that one pass fills, each before the next is asked for."""
    with open_store(store) as opened:
        plan = plan_concat(opened, split="train", seq_len=512)
        with Loader(plan, batch_rows=8, prefetch_batches=prefetch) as loader:
            for batch, _ in zip(loader, range(-(-plan.num_rows // 8)), strict=False):
                yield batch.tokens.copy()


def token_is_trained_on(store: Path, segment: int, token: int) -> bool:
    with open_store(store) as opened:
        documents = opened.kept_documents("train")
        inside = (
            (opened.arrays["segment"][documents] == segment)
            & (opened.arrays["offset"][documents] <= token)
            & (token < opened.arrays["offset"][documents] + opened.arrays["length"][documents])
        )
    return bool(inside.any())


COMMAND = "import sys; from penstock.cli import main; main(sys.argv[1:])"


def verify_command(store: Path, *options: str, optimised: bool = False) -> tuple[int, dict[str, Any]]:
    flags = ["-O"] if optimised else []
    done = subprocess.run(
        [sys.executable, *flags, "-c", COMMAND, "verify", str(store), "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_flips_through_the_command(tiny: Committed, large: Committed, scale: Scale, torture_figures: Figures):
    """The same answer from the command itself, with and without `python -O`; whole before and after."""
    count = Count()
    chance = random.Random(4)
    names = [(tiny, name) for name in tiny.files] + 5 * [(large, name) for name in large.files if "tokens" in name]
    for trial in range(scale(test=1, torture=100)):
        store, name = chance.choice(names)
        path = store.path / name
        with flipped(path, chance.randrange(path.stat().st_size), chance.randrange(8)):
            code, answer = verify_command(store.path, optimised=trial % 2 == 1)
        count.add(code == 1 and not answer["ok"] and name in {p["file"] for p in answer["problems"]}, name)
    assert verify_command(large.path)[0] == 0
    count.tell(torture_figures, "random bit flips, by the command verify, half of them under python -O")


def test_quick_finds_all_but_tokens(tiny: Committed, scale: Scale, torture_figures: Figures):
    """`--quick` is a promise too: any bit outside the tokens is found."""
    count = Count()
    chance = random.Random(6)
    names = [name for name in tiny.files if not name.endswith(".tokens")]
    for _ in range(scale(test=30, torture=2_000)):
        name = chance.choice(names)
        path = tiny.path / name
        with flipped(path, chance.randrange(path.stat().st_size), chance.randrange(8)):
            count.add(name in {problem.file for problem in verify(tiny.path, quick=True)}, name)
    with flipped(tiny.path / f"segments/{tiny.manifest.segments[0].name}.tokens", 0, 0):
        assert verify(tiny.path, quick=True) == []
        assert verify(tiny.path) != []
    assert MANIFEST in names
    count.tell(torture_figures, "random bit flips outside the tokens, by verify --quick")
