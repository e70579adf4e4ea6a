"""Every loader that `bench load` times gives the same rows, and what is said to be complete is."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.bench import loading, loading_frameworks, loading_orders, loading_peers
from penstock.bench.arrival import completed
from penstock.bench.drawn_store import write_drawn_store
from penstock.bench.loading_figures import open_and_load, resume_far
from penstock.bench.processes import run_own
from penstock.load import Loader
from penstock.store import open_store, verify

torch = pytest.importorskip("torch")

SEQ_LEN, BATCH = 64, 4
TIMING = {"seq_len": SEQ_LEN, "batch_size": BATCH, "num_batches": 12, "passes": 2}


@pytest.fixture(scope="module")
def rows(store_folder: str, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A small store, and its rows as the flat file that the peers start from."""
    folder = tmp_path_factory.mktemp("bench-load")
    facts = loading.describe_rows(store=store_folder, seq_len=SEQ_LEN)
    written = loading.write_rows(store=store_folder, seq_len=SEQ_LEN, out=str(folder / "rows"))
    return SimpleNamespace(
        folder=folder,
        store=store_folder,
        file=str(folder / "rows"),
        dtype=facts["dtype"],
        num_rows=written["rows"],
        end_id=facts["end_id"],
        written={"rows": str(folder / "rows"), "dtype": facts["dtype"], "seq_len": SEQ_LEN},
    )


@pytest.fixture(scope="module")
def own(rows: SimpleNamespace) -> Counter[bytes]:
    """How often each full row comes in a pass of our own loader."""
    plan = loading.opened_plan(rows.store, seq_len=SEQ_LEN)
    found: Counter[bytes] = Counter()
    with Loader(plan, batch_rows=1) as loader:
        for _ in range(plan.num_rows):
            batch = next(loader)
            if batch.rows[0] < rows.num_rows:
                found[batch.tokens[0].astype(np.int64).tobytes()] += 1
    assert sum(found.values()) == rows.num_rows
    return found


def _assert_same_rows(batches: Callable[[], Any], own: Counter[bytes]) -> None:
    """In each of two passes; what doesn't fill a batch is left out, by everybody."""
    orders = []
    for _ in range(2):
        given = [row.tobytes() for batch in batches() for row in batch.numpy().astype(np.int64)]
        assert len(given) == sum(own.values()) // BATCH * BATCH
        assert Counter(given) <= own
        orders.append(given)
    assert orders[0] != [key for key, count in own.items() for _ in range(count)]


def _litdata(rows: SimpleNamespace, width: str) -> str:
    """The rows in litdata's format; made once, because it starts processes for that."""
    out = rows.folder / f"litdata-{width}"
    if not out.exists():
        settings = {**rows.written, "wanted": width, "out": str(out)}
        run_own("loading_peers:write_litdata", settings, folder=rows.folder)
    return str(out)


def _tokens(name: str, rows: SimpleNamespace) -> Callable[[], Any]:
    """A peer's batches, from its own format."""
    timing = loading.Timing(**TIMING)
    out = str(rows.folder / name)
    if name.startswith("litdata"):
        pytest.importorskip("litdata")
        return loading_peers.litdata_batches(_litdata(rows, name.partition("-")[2]), timing)
    if name == "mosaic":
        pytest.importorskip("streaming")
        loading_peers.write_mosaic(**rows.written, out=out)
        return loading_peers.mosaic_batches(out, timing)
    if name.startswith("datasets"):
        pytest.importorskip("datasets")
        loading_peers.write_datasets(**rows.written, out=out)
        return loading_peers.datasets_batches(out, timing, row_format=name.partition("-")[2])
    if name == "grain":
        pytest.importorskip("grain")
        return loading_peers.grain_batches(rows.file, rows.dtype, timing)
    pytest.importorskip("tensorflow")
    return loading_peers.tensorflow_batches(rows.file, rows.dtype, timing)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("litdata-int64", marks=pytest.mark.torture(lane="D", sample=False)),
        "litdata-uint16",
        "mosaic",
        "datasets-torch",
        "datasets-numpy",
        "grain",
        "tensorflow",
    ],
)
def test_a_peer_gives_the_rows_that_we_give(name: str, rows: SimpleNamespace, own: Counter[bytes]) -> None:
    _assert_same_rows(_tokens(name, rows), own)


def test_tokens_are_completed_to_what_our_loader_gives(rows: SimpleNamespace) -> None:
    from penstock.load.torch import TorchLoader

    plan = loading.opened_plan(rows.store, seq_len=SEQ_LEN)
    ends = 0
    # In the plan's order, so that the padded row comes last, and is left out.
    with TorchLoader(plan, batch_rows=BATCH, shuffle=False) as loader:
        for _ in range(rows.num_rows // BATCH):
            batch = next(loader)
            inputs, labels, positions = completed(batch.tokens, rows.end_id)
            ends += int((inputs == rows.end_id).sum())
            assert torch.equal(inputs, batch.inputs)
            assert torch.equal(labels, batch.labels)
            assert torch.equal(positions, batch.position_ids)
            assert {labels.dtype, positions.dtype, inputs.dtype} == {torch.int64}
    assert ends > 0


def test_our_loaders_inside_frameworks_run(rows: SimpleNamespace) -> None:
    """Each where it is installed; what they give is tested in tests/load."""
    common: dict[str, Any] = {"timing": TIMING, "store": rows.store}
    reports = [loading_frameworks.load_data_loader(**common, data_set=name) for name in ("RowDataset", "RowStream")]
    reports += [loading.load_torch(**common, prefetch_batches=None, everything=True)]
    reports += [loading.load_wire(**common, policy="best-fit", prefetch_batches=0)]
    for package, task in (("jax", "load_jax"), ("grain", "load_grain"), ("tensorflow", "load_tensorflow")):
        if _is_there(package):
            reports.append(getattr(loading_frameworks, task)(**common))
    for report in reports:
        assert report["batches_timed"] == [11, 11]
        assert report["later_passes"] > 0


def _is_there(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def test_a_pass_cut_short_gives_the_same_rows_again(rows: SimpleNamespace) -> None:
    timing = loading.Timing(**{**TIMING, "num_batches": 3})
    plan = loading.opened_plan(rows.store, seq_len=SEQ_LEN)
    with Loader(plan, batch_rows=BATCH) as loader:
        batches = timing.passes_of(loader, plan.num_rows)
        passes = [[next(given).rows.tolist() for _ in range(3)] for given in (take() for take in (batches, batches))]
        assert passes[0] == passes[1]
        whole = loading.Timing(**{**TIMING, "num_batches": plan.num_rows // BATCH}).passes_of(loader, plan.num_rows)
        assert next(whole()).rows.tolist() != passes[0][0]


def test_a_slow_pass_ends_early() -> None:
    report = loading.timed_passes(
        lambda: iter(range(100)), passes=1, num_batches=100, batch_tokens=1, longest_pass_seconds=0.0
    )
    assert report["batches_timed"] == [1]


def test_resuming_far_away_reads_the_right_place(rows: SimpleNamespace) -> None:
    report = resume_far(store=rows.store, seq_len=SEQ_LEN, batch_size=BATCH, step=10**9)
    assert 0 < report["seconds"] < report["seconds_with_opening"]


def test_a_drawn_store_is_a_store(rows: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "drawn"
    report = write_drawn_store(tokenizer_of=rows.store, num_tokens=50_000, out=str(out))
    assert report["tokens"] == 50_000
    assert verify(out) == []
    with open_store(out) as store:
        assert store.arrays["length"].sum() == 50_000
        assert len(store.kept_documents("train")) == report["documents"] > 10
    for cached in (True, False):
        opened = open_and_load(store=str(out), seq_len=SEQ_LEN, batch_size=BATCH, cached=cached)
        assert opened["tokens"] == 50_000


def test_a_drawn_store_leaves_room_on_the_disk(
    rows: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**9))
    report = write_drawn_store(tokenizer_of=rows.store, num_tokens=10**9, out=str(tmp_path / "drawn"))
    assert report == {"missing": "5.0 GB of disk are free, 6.0 GB are asked for"}
    assert not (tmp_path / "drawn").exists()


def test_memory_is_estimated_within_a_factor_of_two(rows: SimpleNamespace) -> None:
    # Stretches grow to a buffer's size first: all buffers have been filled to the end after 85 batches and 3 times 256.
    settings = {"store": rows.store, "seq_len": SEQ_LEN, "batch_size": 256, "num_batches": 1200, "as_torch": False}
    report = run_own("loading_memory:measure_memory", settings, folder=rows.folder)
    assert report["estimated_bytes"] > 4 * 2**20
    assert 0.5 < report["measured_bytes"] / report["estimated_bytes"] < 2


def test_the_order_of_a_peer_is_measured_on_a_whole_pass(rows: SimpleNamespace) -> None:
    common = {"num_rows": rows.num_rows, "batch_size": BATCH}
    ours = loading_orders.order_of_ours(**common)
    assert 0.25 < ours["mean_distance"] < 0.42
    assert 0.25 < loading_orders.order_of_datasets(**common)["mean_distance"] < 0.42
    with pytest.raises(RuntimeError, match="1 of"):
        loading_orders._quality([0], **common)
    kept = loading_orders._quality(range(rows.num_rows), **common)
    assert kept["mean_distance"] == pytest.approx(1 / rows.num_rows)


def test_the_order_of_litdata_is_that_of_its_rows(rows: SimpleNamespace) -> None:
    pytest.importorskip("litdata")
    settings = {"seq_len": SEQ_LEN, "num_rows": rows.num_rows, "batch_size": BATCH}
    report = loading_orders.order_of_litdata(folder=_litdata(rows, "uint16"), **settings)
    assert report["rows"] == rows.num_rows
    assert 0.25 < report["mean_distance"] < 0.42  # all of it is one chunk here
