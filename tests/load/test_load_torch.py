"""Tensors against the slow reference, in both store widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from penstock.errors import ConfigError  # noqa: E402
from penstock.load import Loader  # noqa: E402
from penstock.load.torch import IGNORED_LABEL, TorchBatch, TorchLoader, sequential_batches  # noqa: E402
from penstock.pack import Plan, plan_concat  # noqa: E402

from .conftest import SMALL_STORE_NAMES, WIDE_PAIR_ID, Sample  # noqa: E402
from .reference import ReferenceRow, group_numbers  # noqa: E402

Samples = Callable[[str], Sample]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def in_order_of_appearance(ids: torch.Tensor) -> list[list[int]]:
    """Document numbers renamed 0, 1, 2… so that only which ones are equal counts."""
    names: dict[int, int] = {}
    return [[names.setdefault(value, len(names)) for value in line] for line in ids.tolist()]


def assert_tensors_equal(batch: TorchBatch, rows: list[ReferenceRow]) -> None:
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert batch.inputs.tolist() == [row.tokens[:-1] for row in rows]
    assert batch.labels.tolist() == [row.labels for row in rows]
    assert in_order_of_appearance(batch.document_ids) == group_numbers(rows)
    assert batch.borders.tolist() == borders_of(batch)
    assert batch.num_targets == sum(sum(row.mask) for row in rows)
    assert batch.num_targets == int((batch.labels != IGNORED_LABEL).sum())
    assert len(batch) == len(rows)


def borders_of(batch: TorchBatch) -> list[int]:
    """The first place of each document, in a power of two of places that holds two a row, then the end."""
    flat = batch.document_ids.flatten().tolist()
    begins = [place for place in range(len(flat)) if place == 0 or flat[place] != flat[place - 1]]
    places = 1
    while places < max(len(begins), 2 * len(batch)):
        places *= 2
    return begins + [len(flat)] * (places + 1 - len(begins))


def wanted_rows(sample: Sample, plan: Plan, numbers: list[int]) -> list[ReferenceRow]:
    reference = sample.splits[plan.split]
    return [reference.row(number, plan.seq_len, boundaries=plan.boundaries) for number in numbers]


@given(
    name=st.sampled_from(SMALL_STORE_NAMES),
    seq_len=st.integers(1, 64),
    batch_rows=st.integers(1, 9),
    boundaries=st.booleans(),
    seed=st.integers(0, 100),
    prefetch=st.sampled_from([0, 1, 8]),
)
@settings(max_examples=25, deadline=None)
def test_tensors_equal_the_reference(
    sample: Samples, name: str, seq_len: int, batch_rows: int, boundaries: bool, seed: int, prefetch: int
) -> None:
    one = sample(name)
    plan = plan_concat(one.store, split="val", seq_len=seq_len, boundaries=boundaries)
    options = {"batch_rows": batch_rows, "seed": seed, "prefetch_batches": prefetch}
    with TorchLoader(plan, **options) as loader, Loader(plan, **options) as plain:
        for _ in range(4):
            assert_tensors_equal(next(loader), wanted_rows(one, plan, next(plain).rows.tolist()))
        assert loader.position == plain.position
        assert loader.state_dict() == plain.state_dict()


def test_ids_above_16_bits_arrive_whole(sample: Samples) -> None:
    one = sample("wide")
    plan = plan_concat(one.store, seq_len=32)
    batch = next(iter(sequential_batches(plan, batch_rows=plan.num_rows)))
    assert int((batch.inputs == WIDE_PAIR_ID).sum()) > 10
    assert int(batch.inputs.max()) == one.train.pad_id > 65_535


@given(data=st.data(), seq_len=st.integers(1, 40), boundaries=st.booleans(), batch_rows=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_slices_agree_with_the_whole(
    sample: Samples, data: st.DataObject, seq_len: int, boundaries: bool, batch_rows: int
) -> None:
    one = sample("parts")
    plan = plan_concat(one.store, seq_len=seq_len, boundaries=boundaries)
    with TorchLoader(plan, batch_rows=batch_rows, prefetch_batches=0) as loader:
        batch = next(loader)
    bound = st.one_of(st.none(), st.integers(-batch_rows - 2, batch_rows + 2))
    cut = slice(data.draw(bound, label="from"), data.draw(bound, label="to"))
    part = batch[cut]
    assert torch.equal(part.inputs, batch.inputs[cut])
    assert torch.equal(part.labels, batch.labels[cut])
    assert torch.equal(part.document_ids, batch.document_ids[cut])
    assert part.num_targets == int(part.loss_mask.sum())
    assert len(part) == len(range(batch_rows)[cut])
    inner = part[1:]  # a slice of a slice
    assert torch.equal(inner.document_ids, batch.document_ids[cut][1:])
    assert len(inner) == 0 or inner.borders.tolist() == borders_of(inner)
    assert torch.equal(inner.labels, batch.labels[cut][1:])


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 8])
def test_micro_batches_add_up(sample: Samples, micro_rows: int) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    batch = next(iter(sequential_batches(plan, batch_rows=8)))
    parts = [batch[first : first + micro_rows] for first in range(0, 8, micro_rows)]
    assert sum(part.num_targets for part in parts) == batch.num_targets
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert torch.equal(torch.cat([part.document_ids for part in parts]), batch.document_ids)


@pytest.mark.parametrize("step", [2, -1])
def test_a_slice_with_a_step_is_refused(sample: Samples, step: int) -> None:
    """Its document numbers would be those of other rows."""
    batch = next(iter(sequential_batches(plan_concat(sample("letters").store, seq_len=24), batch_rows=8)))
    with pytest.raises(ValueError, match="step"):
        batch[::step]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_kept_are_not_overwritten(sample: Samples, prefetch: int) -> None:
    one = sample("letters")
    plan = plan_concat(one.store, seq_len=24)
    with TorchLoader(plan, batch_rows=3, shuffle=False, prefetch_batches=prefetch) as loader:
        kept = [next(loader) for _ in range(5)]
        for _ in range(20):
            next(loader)
    for number, batch in enumerate(kept):
        assert_tensors_equal(batch, wanted_rows(one, plan, list(range(3 * number, 3 * number + 3))))


def test_a_torch_loader_resumes(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    with TorchLoader(plan, batch_rows=5, seed=3) as loader, TorchLoader(plan, batch_rows=5, seed=3) as again:
        for _ in range(4):
            next(loader)
        again.load_state_dict(loader.state_dict())
        for _ in range(8):
            assert torch.equal(next(loader).tokens, next(again).tokens)


@given(
    name=st.sampled_from(SMALL_STORE_NAMES),
    seq_len=st.integers(1, 64),
    batch_rows=st.integers(1, 50),
    limit=st.one_of(st.none(), st.integers(0, 60), st.just(10**6)),
    boundaries=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_sequential_batches_give_each_row_once_in_order(
    sample: Samples, name: str, seq_len: int, batch_rows: int, limit: int | None, boundaries: bool
) -> None:
    one = sample(name)
    plan = plan_concat(one.store, split="test", seq_len=seq_len, boundaries=boundaries)
    end = plan.num_rows if limit is None else min(limit, plan.num_rows)
    batches = list(sequential_batches(plan, batch_rows=batch_rows, limit_rows=limit))
    sizes = [len(batch) for batch in batches]
    assert sum(sizes) == end
    assert all(size == batch_rows for size in sizes[:-1])
    for number, batch in enumerate(batches):
        first = number * batch_rows
        assert_tensors_equal(batch, wanted_rows(one, plan, list(range(first, first + len(batch)))))


@pytest.mark.parametrize("batch_rows", [0, -1])
def test_sequential_batches_of_no_rows_are_refused(sample: Samples, batch_rows: int) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    with pytest.raises(ConfigError):
        list(sequential_batches(plan, batch_rows=batch_rows))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [0, 1, 2, 8])
@pytest.mark.parametrize("name", ["letters", "wide"])
def test_a_gpu_gets_what_a_cpu_gets_while_it_computes(sample: Samples, name: str, prefetch: int) -> None:
    """Copies run beside a long queue of computation, which must neither hold them up nor see a buffer filled again."""
    plan = plan_concat(sample(name).store, seq_len=24)
    options = {"batch_rows": 5, "seed": 3, "prefetch_batches": prefetch}
    work = torch.randn(2048, 2048, device="cuda")
    with TorchLoader(plan, device="cuda", **options) as loader, TorchLoader(plan, **options) as plain:
        kept = []
        for _ in range(40):
            batch = next(loader)
            for _ in range(5):
                work = work @ work / 2048
            kept.append((batch, batch.tokens * 1))
        for batch, seen in kept:
            wanted = next(plain)
            assert torch.equal(seen.cpu(), wanted.tokens)
            for field in ("tokens", "loss_mask", "cu_seqlens", "labels", "document_ids", "position_ids"):
                assert torch.equal(getattr(batch, field).cpu(), getattr(wanted, field)), field
            assert torch.equal(batch[1:4].position_ids.cpu(), wanted[1:4].position_ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_asking_for_a_batch_does_not_wait_for_the_gpu_to_compute(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=24)
    work = torch.randn(8192, 8192, device="cuda")
    with TorchLoader(plan, device="cuda", batch_rows=5) as loader:
        next(loader)
        torch.cuda.synchronize()
        for _ in range(200):
            work = work @ work / 8192
        computed = torch.cuda.current_stream().record_event()
        next(loader)
        next(loader)
        assert not computed.query()  # still computing: nothing waited for it


def test_the_package_needs_no_torch() -> None:
    import subprocess
    import sys

    script = "import sys, penstock.load, penstock.load.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
