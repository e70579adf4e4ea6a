"""Mixtures: which source stands where, which documents are whose, what can't be mixed."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.pack import make_plan
from penstock.pack.interleave import MOST_FOR_BEST_TREE, Interleaving
from penstock.pack.mixture import Mixture, make_mixture, parse_mix
from penstock.pack.stages import Schedule
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, document_origin, open_store, prepare
from penstock.tokenize import Tokenizer, TokenizerSpec, load_tokenizer
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import character_of_byte

from .conftest import StoreOf

shares = st.lists(st.integers(1, 10**6).map(lambda n: Fraction(n, 1000)), min_size=1, max_size=9)
FILES = {
    "src/main.py": 700,
    "src/deep/er/x.py": 300,
    "docs/index.md": 500,
    "docs/src/odd.py": 90,
    "README.md": 200,
    "tests/test_x.py": 150,
}


def series(interleaving: Interleaving, start: int, count: int) -> tuple[list[int], list[int]]:
    """Source and cursor at each position."""
    sources, cursors = np.full(count, -1), np.full(count, -1)
    for source, places, before in interleaving.runs(start, count):
        assert (sources[places] == -1).all()
        sources[places] = source
        cursors[places] = before + np.arange(len(places))
    return sources.tolist(), cursors.tolist()


@settings(max_examples=30, deadline=None)
@given(shares=shares)
def test_every_prefix_holds_each_source_by_its_share(shares: list[Fraction]) -> None:
    interleaving = Interleaving(dict(enumerate(shares)))
    sources, cursors = series(interleaving, 0, 300)
    counts = [0] * len(shares)
    parts = [float(share / sum(shares)) for share in shares]
    furthest = 0.0
    for position, (source, cursor) in enumerate(zip(sources, cursors, strict=True)):
        assert interleaving.counts(position) == dict(enumerate(counts))
        assert cursor == counts[source]
        assert interleaving.place_of(source, cursor) == position
        counts[source] += 1
        off = (abs(count - (position + 1) * part) for count, part in zip(counts, parts, strict=True))
        furthest = max(furthest, *off)
    # Fractions of 2^31 and less stand in for shares: over 300 positions no count moves by a millionth.
    assert furthest <= interleaving.most_off + 1e-6
    assert interleaving.most_off < (1 if len(shares) <= 3 else 1.2)


@settings(max_examples=40, deadline=None)
@given(shares=shares, start=st.integers(0, 2**62), cut=st.integers(0, 50))
def test_any_stretch_is_part_of_the_same_series(shares: list[Fraction], start: int, cut: int) -> None:
    interleaving = Interleaving(dict(enumerate(shares)))
    whole = series(interleaving, start, 50)
    parts = series(interleaving, start, cut), series(interleaving, start + cut, 50 - cut)
    assert whole == tuple(one + other for one, other in zip(*parts, strict=True))
    assert sum(interleaving.counts(start).values()) == start


def test_many_sources_have_huffmans_bound() -> None:
    shares = {number: Fraction(1, 1 + number) for number in range(MOST_FOR_BEST_TREE + 20)}
    interleaving = Interleaving(shares)
    sources, _ = series(interleaving, 0, 2000)
    total = sum(shares.values())
    counted = np.cumsum(np.array(sources)[:, None] == np.arange(len(shares)), axis=0)
    wanted = np.arange(1, 2001)[:, None] * np.array([float(share / total) for share in shares.values()])
    assert np.abs(counted - wanted).max() <= interleaving.most_off <= 1.69


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_schedule_equals_counting(data: st.DataObject) -> None:
    """Stages and epochs against a reference that counts one position after another."""
    num_rows = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    number = len(num_rows)
    last = [data.draw(st.none() | st.integers(0, 3 * rows)) for rows in num_rows]
    weight = st.sampled_from([0.0, 0.3, 1.0, 3.0])
    weights = st.lists(weight, min_size=number, max_size=number).filter(any)
    schedule = Schedule.begun(num_rows, last, data.draw(weights))
    for step in sorted(data.draw(st.sets(st.integers(1, 60), max_size=3))):
        schedule = schedule.changed(step, data.draw(weights))
    counts = [0] * number
    for position in range(90):
        assert schedule.cursors_at(position) == tuple(counts)
        stage = [stage for stage in schedule.stages if stage.start <= position][-1]
        able = [
            source
            for source in range(number)
            if stage.weights[source] > 0 and (last[source] is None or counts[source] < last[source])
        ]
        if not able:
            with pytest.raises(PlanError):
                list(schedule.runs(position, 1))
            break
        ((source, places, cursor),) = schedule.runs(position, 1)
        assert source in able
        assert (places.tolist(), cursor) == ([0], counts[source])
        counts[source] += 1
    again = Schedule(num_rows, last, schedule.stages)
    assert again.cursors_at(50) == schedule.cursors_at(50)


def test_stages_are_only_appended() -> None:
    schedule = Schedule.begun([5, 5], [None, None], [1, 1]).changed(10, [1, 2])
    with pytest.raises(PlanError, match="10"):
        schedule.changed(9, [3, 1])
    assert [stage.start for stage in schedule.changed(10, [3, 1]).stages] == [0, 10]  # the empty one is replaced
    assert [stage.start for stage in schedule.changed(11, [3, 1]).stages] == [0, 10, 11]


# Buckets


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tree_store(tmp_path_factory.mktemp("code"), end="<|endoftext|>")


def tree_store(folder: Path, *, end: str) -> Store:
    for name, size in FILES.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(33 + (7 * place + len(name)) % 90 for place in range(size)))
    vocabulary = {character: byte for byte, character in enumerate(character_of_byte)}
    spec = TokenizerSpec.from_json(byte_level_json(vocabulary, [], {end: 256}, pattern=GPT2_PATTERN), origin="bytes")
    source = FilesSource(name="files", root=str(folder / "files"))
    prepare([source], folder / "store", tokenizer=Tokenizer(spec, origin="b"), options=PrepareOptions(split="train=1"))
    return open_store(folder / "store")


def files_of(mixture: Mixture) -> dict[str, tuple[float, set[str]]]:
    return {
        source.name: (
            source.weight,
            {
                document_origin(source.plan.store, int(number)).key.removeprefix("files/")
                for number in source.plan.documents
            },
        )
        for source in mixture.sources
    }


def test_path_rules_make_buckets_and_the_first_match_wins(code: Store) -> None:
    mixture = make_mixture({"code": code}, ["src/** = 3, docs/** = 0.3"], seq_len=50)
    assert files_of(mixture) == {
        "src/**": (3.0, {"src/main.py", "src/deep/er/x.py"}),
        "docs/**": (0.3, {"docs/index.md", "docs/src/odd.py"}),
        "rest": (1.0, {"README.md", "tests/test_x.py"}),
    }
    turned = files_of(make_mixture({"code": code}, ["*.py=2", "docs/**=0.3", "**=0"], seq_len=50))
    assert turned["*.py"] == (2.0, {name for name in FILES if name.endswith(".py")})
    assert turned["docs/**"] == (0.3, {"docs/index.md"})
    assert turned["**"] == (0.0, {"README.md"})
    assert "rest" not in turned


def test_no_row_mixes_buckets_and_every_token_is_in_one(code: Store) -> None:
    mixture = make_mixture({"code": code}, ["src/**=3", "docs/**=0.3"], seq_len=50)
    whole = make_plan(code, seq_len=50)
    assert sum(plan.num_tokens for plan in mixture.plans) == whole.num_tokens
    for plan in mixture.plans:
        found = plan.spans(np.arange(plan.num_rows)).document
        assert set(found.tolist()) == set(plan.documents.tolist())


def test_figures_of_a_mixture(code: Store) -> None:
    facts = make_mixture({"code": code}, ["src/**=3", "docs/**=0.3"], seq_len=50).describe()
    rows = {one["name"]: one["rows"] for one in facts["mix"]}
    epoch = 3 * rows["src/**"] + 0.3 * rows["docs/**"] + rows["rest"]
    assert facts["epoch_rows"] == pytest.approx(epoch)
    for one in facts["mix"]:
        assert one["share"] == pytest.approx(one["weight"] * one["rows"] / epoch)
        assert one["passes_per_epoch"] == one["weight"]


@pytest.mark.parametrize("temperature", [1, 2])
@pytest.mark.parametrize("passes", ["0", "0.001"])  # of some tens of rows that is none
def test_a_source_that_never_gives_a_row_has_no_share(code: Store, temperature: float, passes: str) -> None:
    words = ["src/**=3", "docs/**=2"]
    mixture = make_mixture({"code": code}, words, epochs=[f"src/**={passes}"], seq_len=50, temperature=temperature)
    without = make_mixture({"code": code}, ["src/**=0", "docs/**=2"], seq_len=50, temperature=temperature)
    assert mixture.epoch_rows == without.epoch_rows
    facts, expected = mixture.describe(), without.describe()
    assert facts["epoch_rows"] == expected["epoch_rows"]
    for figure in ("share", "passes_per_epoch", "rows_per_epoch"):
        assert [one[figure] for one in facts["mix"]] == [one[figure] for one in expected["mix"]]
    given = {int(source) for source, _, _ in mixture.schedule().runs(0, 3 * mixture.epoch_rows)}
    assert given == {number for number, one in enumerate(facts["mix"]) if one["share"] > 0}


def test_a_saved_position_of_a_mixture_fits_whatever_its_epochs_show(code: Store) -> None:
    """The stages of a saved state hold weights as they were given."""
    mixture = make_mixture({"code": code}, ["src/**=3"], epochs=["src/**=0"], seq_len=50)
    assert mixture.schedule().stages[0].weights == (3.0, 1.0)


def test_temperature_makes_sources_alike(code: Store) -> None:
    flat = make_mixture({"code": code}, ["src/**=1", "docs/**=1"], seq_len=50)
    warm = make_mixture({"code": code}, ["src/**=1", "docs/**=1"], seq_len=50, temperature=2)
    rows = np.array([plan.num_rows for plan in flat.plans])
    shares = np.array([one["share"] for one in warm.describe()["mix"]])
    np.testing.assert_allclose(shares, np.sqrt(rows) / np.sqrt(rows).sum(), rtol=1e-6)
    assert np.dot(warm.weights, rows) == pytest.approx(rows.sum())
    assert [one["share"] for one in flat.describe()["mix"]] == pytest.approx((rows / rows.sum()).tolist())


def test_a_stores_weight_multiplies_its_buckets(code: Store, store_of: StoreOf) -> None:
    with store_of([40, 20, 90]) as other:
        mixture = make_mixture({"code": code, "other": other}, ["code=2", "code:src/**=3"], seq_len=50)
        assert {source.name: source.weight for source in mixture.sources} == {
            "code:src/**": 6.0,
            "code:rest": 2.0,
            "other": 1.0,
        }


def test_the_identity_tells_buckets_apart_but_not_weights(code: Store) -> None:
    def fingerprint(*mix: str, **options: object) -> str:
        return make_mixture({"code": code}, mix, **{"seq_len": 50, **options}).fingerprint  # type: ignore[arg-type]

    assert fingerprint("src/**=3") == fingerprint("src/**=2")
    different = [
        fingerprint("src/**=3"),
        fingerprint("docs/**=3"),
        fingerprint(),
        fingerprint("src/**=3", seq_len=51),
        fingerprint("src/**=3", epochs=["rest=2"]),
    ]
    assert len(set(different)) == len(different)


# What is refused


@pytest.mark.parametrize("word", ["src", "=3", "src=", "src=x", "src=-1", "src=nan", "src=inf", "src=1e-9", "a=1,", ""])
def test_words_that_cannot_be_read(word: str) -> None:
    with pytest.raises(PlanError, match="expected NAME=NUMBER"):
        parse_mix([word])


@pytest.mark.parametrize(
    ("mix", "epochs"),
    [(["code=1,code=2"], []), (["code=1", "code=1"], []), (["src/**=2", "src/**=2"], []), ([], ["code=1", "code=2"])],
)
def test_a_name_twice_is_refused(code: Store, mix: list[str], epochs: list[str]) -> None:
    with pytest.raises(PlanError, match=r"'(code|src/\*\*)' twice, with [12] and [12]"):
        make_mixture({"code": code}, mix, epochs=epochs, seq_len=50)


@pytest.mark.parametrize(
    ("mix", "options"),
    [
        (["nothing/**=2"], {}),
        (["src/**=2", "src/main.py=3"], {}),  # nothing is left for the second
        (["cood=2"], {}),
        (["**=0"], {}),
        ([], {"temperature": 0}),
        ([], {"temperature": float("nan")}),
        ([], {"epochs": ["nowhere=1"]}),
        ([], {"epochs": ["code=0"]}),
        (["src/**=0"], {"epochs": ["rest=0"]}),
        ([], {"split": "nowhere"}),
        (["src/**=2", "[=1"], {}),
    ],
)
def test_mixtures_that_cannot_be(code: Store, mix: list[str], options: dict[str, object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the kind is checked below
        make_mixture({"code": code}, mix, seq_len=50, **options)  # type: ignore[arg-type]
    assert hasattr(caught.value, "hint"), repr(caught.value)


def test_two_tokenizers_cannot_be_mixed(code: Store, tmp_path: Path) -> None:
    with tree_store(tmp_path, end="<eos>") as other, pytest.raises(PlanError) as caught:
        make_mixture({"code": code, "other": other}, seq_len=50)
    assert code.manifest.tokenizer["digest"] in caught.value.message
    assert other.manifest.tokenizer["digest"] in caught.value.message
    named = caught.value.hint.rpartition("--tokenizer ")[2]
    assert load_tokenizer(named).digest == code.manifest.tokenizer["digest"]
