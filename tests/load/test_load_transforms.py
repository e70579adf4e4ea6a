"""Transforms: what they do to a row, undone and counted by hand; and that it follows from (seed, row, pass) alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ResumeError, TokenizerError
from penstock.load import Batch, Loader
from penstock.load.filling import Filler
from penstock.load.transforms import FillInTheMiddle, OwnTransform, RandomCrop, draws, row_keys
from penstock.pack import Plan, make_plan, plan_concat
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import character_of_byte

from .conftest import END_ID, Sample, letter_files, tokenizer_of, write_files

Samples = Callable[[str], Sample]
PREFIX, SUFFIX, MIDDLE = 300, 301, 302
GOLDEN_KEYS = [17116735367957209932, 1389576354400641226, 8600241142635218178]
GOLDEN_DRAWS = [0.5897521206848605, 0.29666199167956164, 0.2645085809670059]
FIM_CONTROLS = {"<fim_prefix>": PREFIX, "<fim_suffix>": SUFFIX, "<fim_middle>": MIDDLE}
BYTES = {character: byte for byte, character in enumerate(character_of_byte)}


@pytest.fixture(scope="module")
def code_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The letters, with a tokenizer that has marks for fill-in-the-middle."""
    folder = tmp_path_factory.mktemp("code")
    fillers = {f"filler{token}": token for token in range(257, PREFIX)}
    controls = {"<|endoftext|>": END_ID, **FIM_CONTROLS}
    tokenizer = tokenizer_of(byte_level_json(BYTES | fillers, [], controls, pattern=GPT2_PATTERN))
    write_files(folder / "files", letter_files())
    source = FilesSource(name="files", root=str(folder / "files"))
    prepare([source], folder / "store", tokenizer=tokenizer, options=PrepareOptions(split="train=1", unit_bytes=600))
    with open_store(folder / "store") as store:
        yield store


def batches_of(plan: Plan, transforms: list[Any], *, count: int = 1, **options: Any) -> list[Batch]:
    """Copies of the first batches, each of all rows in the plan's order unless told otherwise."""
    options = {"batch_rows": plan.num_rows, "shuffle": False, "seed": 7, "prefetch_batches": 0} | options
    with Loader(plan, transforms=transforms, **options) as loader:
        return [
            Batch(b.tokens.copy(), b.loss_mask.copy(), b.cu_seqlens.copy(), b.rows.copy(), b.position)
            for b in itertools.islice(loader, count)
        ]


def parts_of(batch: Batch, row: int, *, boundaries: bool = True) -> list[tuple[int, int]]:
    """Begin and end of each document's tokens in a row, the last label among them where it is the document's."""
    seq_len = batch.loss_mask.shape[1]
    if boundaries:
        first, last = np.searchsorted(batch.cu_seqlens, [row * seq_len, (row + 1) * seq_len])
        begins = (batch.cu_seqlens[first:last] - row * seq_len).tolist()
    else:
        begins = [0, *(place + 1 for place in range(seq_len - 1) if batch.tokens[row, place] == END_ID)]
    # Where borders are off, the label behind a last end token is the first token of another document.
    has_label = batch.loss_mask[row, -1] and (boundaries or batch.tokens[row, seq_len - 1] != END_ID)
    ends = [*begins[1:], seq_len + bool(has_label)]
    return list(zip(begins, ends, strict=True))


def undone(tokens: list[int]) -> list[int] | None:
    """The body of a document that was cut at two places, put together again; None where it wasn't."""
    if tokens[:1] != [PREFIX]:
        return None
    suffix_mark, middle_mark = tokens.index(SUFFIX), tokens.index(MIDDLE)
    suffix = tokens[suffix_mark + 1 : middle_mark]
    if suffix_mark == 1:  # either order may begin like this; where the prefix is empty both are the same
        return tokens[middle_mark + 1 :] + suffix
    return tokens[1:suffix_mark] + tokens[middle_mark + 1 :] + suffix


@given(
    seq_len=st.integers(2, 90),
    rate=st.sampled_from([0.0, 0.3, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
    boundaries=st.booleans(),
    policy=st.sampled_from(["concat", "best-fit", "windows", "pad"]),
    seed=st.integers(0, 5),
)
@settings(max_examples=12, deadline=None)
def test_fill_in_the_middle_undone_is_the_row(
    code_store: Store, seq_len: int, rate: float, spm_rate: float, boundaries: bool, policy: str, seed: int
) -> None:
    plan = make_plan(code_store, policy=policy, seq_len=seq_len, boundaries=boundaries)
    fim = FillInTheMiddle.for_plan(plan, rate=rate, spm_rate=spm_rate)
    (before,), (after,) = batches_of(plan, []), batches_of(plan, [fim], seed=seed)
    np.testing.assert_array_equal(before.loss_mask, after.loss_mask)
    np.testing.assert_array_equal(before.cu_seqlens, after.cu_seqlens)
    changed = 0
    for row in range(plan.num_rows):
        covered = np.zeros(seq_len + 1, np.bool_)
        for begin, end in parts_of(before, row, boundaries=boundaries):
            covered[begin:end] = True
            old, new = before.tokens[row, begin:end].tolist(), after.tokens[row, begin:end].tolist()
            is_ended = old[-1] == END_ID
            body = old[: len(old) - is_ended]
            if new == old:
                counts = before.loss_mask[row, begin : end - 1].all()
                assert rate < 1 or len(body) < 10 or not counts
                continue
            changed += 1
            assert new[len(new) - is_ended :] == old[len(old) - is_ended :]  # the end token stays at the end
            found = undone(new[: len(new) - is_ended])
            assert found == body[:-3]
            assert before.loss_mask[row, begin : end - 1].all()
        np.testing.assert_array_equal(before.tokens[row, ~covered], after.tokens[row, ~covered])
    counts = fim.counts
    assert counts.get("tokens_cut", 0) == 3 * changed
    assert counts.get("parts_prefix_first", 0) + counts.get("parts_suffix_first", 0) == changed
    assert not (spm_rate == 0 and "parts_suffix_first" in counts)
    assert not (spm_rate == 1 and "parts_prefix_first" in counts)
    assert not (rate == 0 and changed)


@pytest.mark.parametrize("seq_len", range(12, 20))
def test_end_tokens_stay_where_they_are_across_borders_too(code_store: Store, seq_len: int) -> None:
    plan = make_plan(code_store, seq_len=seq_len, boundaries=False)
    (before,) = batches_of(plan, [])
    (after,) = batches_of(plan, [FillInTheMiddle.for_plan(plan, rate=1.0)])
    np.testing.assert_array_equal(before.tokens == END_ID, after.tokens == END_ID)


def test_rates_are_kept(code_store: Store) -> None:
    plan = plan_concat(code_store, seq_len=64)
    fim = FillInTheMiddle.for_plan(plan, rate=0.4, spm_rate=0.25)
    filler = Filler(plan, seed=7, shuffle=False, transforms=[fim])
    for number in range(60):
        filler.read(np.arange(plan.num_rows), np.full(plan.num_rows, number))
    (before,) = batches_of(plan, [])
    total = sum(len(parts_of(before, row)) for row in range(plan.num_rows)) * 60
    psm, spm = fim.counts["parts_prefix_first"], fim.counts["parts_suffix_first"]
    drawn = psm + spm + fim.counts["parts_too_short"] + fim.counts.get("parts_without_loss_kept", 0)
    assert drawn / total == pytest.approx(0.4, abs=0.02)
    assert spm / (psm + spm) == pytest.approx(0.25, abs=0.03)


def test_conversations_are_left_alone(sample: Samples) -> None:
    """Parts in which some tokens carry no loss."""
    plan = plan_concat(sample("parts").store, seq_len=40)
    fim = FillInTheMiddle(prefix_id=1, suffix_id=2, middle_id=3, end_id=END_ID, rate=1.0)
    (before,), (after,) = batches_of(plan, []), batches_of(plan, [fim])
    assert fim.counts["parts_prefix_first"]
    assert fim.counts["parts_without_loss_kept"]
    # What carries no loss stands where it stood, but for the mark that begins a changed document: no label before it.
    old, new = before.tokens[:, 1:][~before.loss_mask], after.tokens[:, 1:][~after.loss_mask]
    assert set(new[old != new].tolist()) == {1}


def test_a_tokenizer_without_marks_is_refused_by_name(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=16)
    with pytest.raises(
        TokenizerError, match=r"looked for: <\|fim_prefix\|> <\|fim_suffix\|> <\|fim_middle\|>"
    ) as refusal:
        FillInTheMiddle.for_plan(plan)
    assert "<|endoftext|>" in refusal.value.hint
    with pytest.raises(TokenizerError, match=r"looked for: <a> <b> <c>$"):
        FillInTheMiddle.for_plan(plan, names=("<a>", "<b>", "<c>"))
    named = FillInTheMiddle.for_plan(plan, names=("<|endoftext|>", "<|assistant|>", "<|assistant|>"))
    assert (named.prefix_id, named.suffix_id) == (END_ID, END_ID + 1)


@pytest.mark.parametrize("options", [{"rate": 1.5}, {"rate": -0.1}, {"spm_rate": 2}, {"rate": float("nan")}])
def test_a_rate_is_a_share(code_store: Store, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FillInTheMiddle.for_plan(plan_concat(code_store, seq_len=16), **options)


@given(
    seq_len=st.integers(1, 70),
    smallest_share=st.sampled_from([0.0, 0.4, 1.0]),
    boundaries=st.booleans(),
    name=st.sampled_from(["letters", "parts", "wide"]),
)
@settings(max_examples=15, deadline=None)
def test_a_cropped_row_is_a_stretch_of_it(
    sample: Samples, seq_len: int, smallest_share: float, boundaries: bool, name: str
) -> None:
    plan = plan_concat(sample(name).store, split="val", seq_len=seq_len, boundaries=boundaries)
    crop = RandomCrop.for_plan(plan, rate=0.7, smallest_share=smallest_share)
    (before,), (after,) = batches_of(plan, []), batches_of(plan, [crop])
    cut = cropped = 0
    for row in range(plan.num_rows):
        old_begins = [begin for begin, _ in parts_of(before, row)]
        new_begins = [begin for begin, _ in parts_of(after, row)]
        same = np.array_equal(before.tokens[row], after.tokens[row]) and new_begins == old_begins
        if same and np.array_equal(before.loss_mask[row], after.loss_mask[row]):
            continue
        cropped += 1
        length = new_begins[-1]
        assert length >= max(1, int(smallest_share * seq_len))
        cut += seq_len - length
        assert not after.loss_mask[row, length:].any()
        assert (after.tokens[row, length + 1 :] == plan.store.manifest.tokenizer["end_id"]).all()
        fitting = [
            begin
            for begin in range(seq_len - length + 1)
            if np.array_equal(before.tokens[row, begin : begin + length + 1], after.tokens[row, : length + 1])
            and np.array_equal(before.loss_mask[row, begin : begin + length], after.loss_mask[row, :length])
            and [0, *(b - begin for b in old_begins if begin < b < begin + length), length] == new_begins
        ]
        assert fitting
    assert crop.counts.get("tokens_cut", 0) >= cut
    assert crop.counts.get("rows_cropped", 0) >= cropped
    end = plan.num_rows * seq_len
    borders = after.cu_seqlens.tolist()
    assert borders == sorted(borders)
    assert borders[-1] == end


def all_transforms(plan: Plan) -> list[Any]:
    marks = {"prefix_id": 1, "suffix_id": 2, "middle_id": 3}
    return [FillInTheMiddle(**marks, end_id=END_ID, rate=0.8, smallest_tokens=4), RandomCrop.for_plan(plan, rate=0.5)]


@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_what_happens_to_a_row_follows_from_seed_row_and_pass(sample: Samples, prefetch: int) -> None:
    """Not from batch size, rank, place in the batch or prefetching."""
    plan = plan_concat(sample("letters").store, seq_len=24)

    def contents(**options: Any) -> dict[tuple[int, int], bytes]:
        found = {}
        options = {"batch_rows": 4, "seed": 5, "prefetch_batches": prefetch} | options
        for rank in range(options.get("world_size", 1)):
            with Loader(plan, transforms=all_transforms(plan), rank=rank, **options) as loader:
                for _ in range(3 * plan.num_rows // options["batch_rows"]):
                    batch = next(loader)
                    for place, row in enumerate(batch.rows.tolist()):
                        share = options["batch_rows"] // options.get("world_size", 1)
                        position = batch.position + rank * share + place
                        found[row, position // plan.num_rows] = batch.tokens[place].tobytes()
        return found

    wanted = contents(prefetch_batches=0)
    assert wanted.items() >= contents(batch_rows=12).items() >= contents(batch_rows=24, world_size=2).items()
    in_other_order = contents(shuffle=False)
    shared = wanted.keys() & in_other_order.keys()
    assert len(shared) > plan.num_rows
    assert all(wanted[key] == in_other_order[key] for key in shared)
    first, second = ({row: data for (row, number), data in wanted.items() if number == n} for n in (0, 1))
    assert sum(first[row] != second[row] for row in second) > len(second) / 2  # another view each pass
    other_seed = contents(seed=6, shuffle=False)
    assert sum(in_other_order[key] != other_seed[key] for key in other_seed) > len(other_seed) / 2


@pytest.mark.torture(lane="D", sample=True)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_with_transforms_goes_on_from_every_state(sample: Samples, prefetch: int) -> None:
    plan = plan_concat(sample("letters").store, split="val", seq_len=16)
    options = {"batch_rows": 5, "seed": 3, "prefetch_batches": prefetch}
    num_batches = -(-3 * plan.num_rows // 5)
    with Loader(plan, transforms=all_transforms(plan), **options) as loader:
        states, whole = [], []
        for _ in range(num_batches):
            states.append(loader.state_dict())
            batch = next(loader)
            whole.append((batch.tokens.tobytes(), batch.loss_mask.tobytes(), batch.cu_seqlens.tobytes()))
    for number, state in enumerate(states):
        with Loader(plan, transforms=all_transforms(plan), **options) as again:
            again.load_state_dict(state)
            batch = next(again)
            assert (batch.tokens.tobytes(), batch.loss_mask.tobytes(), batch.cu_seqlens.tobytes()) == whole[number]


def noise(batch: Batch, rng_key: np.ndarray) -> None:
    """Some inputs become another letter; what they are labels of stays."""
    for row, key in enumerate(rng_key):
        places = np.flatnonzero(draws(key, batch.loss_mask.shape[1]) < 0.1)
        batch.tokens[row, places] = ord("x")


def test_a_function_of_ones_own(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    own = OwnTransform(function=noise, name="noise", settings={"share": 0.1})
    (plain,), (noisy,) = batches_of(plan, []), batches_of(plan, [own])
    share = (plain.tokens != noisy.tokens)[:, :-1].mean()
    assert share == pytest.approx(0.1, abs=0.02)
    np.testing.assert_array_equal(plain.loss_mask, noisy.loss_mask)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"name": "other"}, {"settings": {"share": 0.2}}],
)
def test_a_state_saved_with_another_transform_is_refused(sample: Samples, change: dict[str, Any]) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    settings = {"function": noise, "name": "noise", "version": 1, "settings": {"share": 0.1}}
    with (
        Loader(plan, batch_rows=2, transforms=[OwnTransform(**settings)]) as loader,
        Loader(plan, batch_rows=2, transforms=[OwnTransform(**settings | change)]) as other,
        Loader(plan, batch_rows=2) as without,
    ):
        for one, two in itertools.permutations([loader, other, without], 2):
            with pytest.raises(ResumeError, match="transforms: saved"):
                one.load_state_dict(two.state_dict())


@pytest.mark.parametrize("value", [object(), {1, 2}, "x" * 5000])
def test_settings_that_fit_no_state_are_refused(sample: Samples, value: Any) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    with pytest.raises(ConfigError):
        Loader(plan, batch_rows=2, transforms=[OwnTransform(function=noise, name="noise", settings={"value": value})])


def test_an_error_in_ones_own_function_comes_where_the_batch_is_asked_for(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)

    def failing(batch: Batch, rng_key: np.ndarray) -> None:
        if batch.position == 12:
            raise ArithmeticError("no such luck")

    with Loader(plan, batch_rows=4, transforms=[OwnTransform(function=failing, name="failing")]) as loader:
        for _ in range(3):
            next(loader)
        with pytest.raises(ArithmeticError, match="no such luck"):
            next(loader)
        assert loader.position == 12


def test_drawn_numbers_never_change() -> None:
    """Golden values: others would silently change what every running training sees."""
    keys = row_keys(1234, np.array([0, 1, 2**40]), np.array([0, 0, 3]), salt=1)
    assert keys.tolist() == GOLDEN_KEYS
    assert draws(keys[0], 3, salt=2).tolist() == GOLDEN_DRAWS


def test_drawn_numbers_are_spread_evenly() -> None:
    keys = row_keys(0, np.arange(4000), np.zeros(4000, np.int64), salt=0)
    assert len(set(keys.tolist())) == 4000
    drawn = np.array([draws(key, 2) for key in keys])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.abs(np.histogram(drawn[:, 0], 10, (0, 1))[0] - 400).max() < 100
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.06
    for other in (
        row_keys(1, np.arange(4000), np.zeros(4000, np.int64), salt=0),
        row_keys(0, np.arange(4000), np.ones(4000, np.int64), salt=0),
        row_keys(0, np.arange(4000), np.zeros(4000, np.int64), salt=1),
    ):
        assert not set(keys.tolist()) & set(other.tolist())
