"""Who takes part in the load benchmark: ours, the ceiling, the peers, and the single figures.

In: what all of them read (`Data`). Out: subjects, each a task for a fresh process. A name says whose loader it is, what
it delivers and the batch size, so that `--skip` can name any of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.processes import Subject
from penstock.bench.result import Role

__all__ = [
    "DATASETS_TORCH",
    "GRAIN",
    "LITDATA",
    "MEMORY_TORCH",
    "MEMORY_WIRE",
    "MOSAIC",
    "NUMPY_TORCH",
    "NUMPY_WIRE",
    "RESUME",
    "TENSORFLOW",
    "TORCH_DEMAND",
    "TORCH_THREAD",
    "TORCH_TOKENS",
    "WIRE_BEST_FIT",
    "WIRE_DEMAND",
    "WIRE_THREAD",
    "Data",
    "figure_subjects",
    "of_size",
    "opening",
    "rate_subjects",
    "shuffle_of",
]

# Of ours a pass takes 0.1 to 0.6 s; one first, eight later. Of others: one each, cut short.
OWN_PASSES = 9
OTHER_PASSES = 2
OTHER_PASS_SECONDS = 1.0
PREFETCH_BATCHES = None  # the loader's own choice
FAR_STEP = 10**9
# TensorFlow and JAX would take all of a GPU's memory, which PyTorch shares with them here.
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# Enough batches to fill every buffer, few enough to take seconds.
MEMORY_TOKENS = 2**26
MEMORY_BATCHES = (16, 256)

COMPLETE = "torch int64 tokens, labels and positions"
WIRE_THREAD = "penstock, wire, concat, filled ahead by a thread"
WIRE_DEMAND = "penstock, wire, concat, filled on demand"
WIRE_BEST_FIT = "penstock, wire, best-fit, filled ahead by a thread"
TORCH_TOKENS = "penstock, torch int64 tokens, filled ahead by a thread"
TORCH_THREAD = f"penstock, {COMPLETE}, filled ahead by a thread"
TORCH_DEMAND = f"penstock, {COMPLETE}, filled on demand"
NUMPY_WIRE = "numpy memory-map gather, store width"
NUMPY_TORCH = "numpy memory-map gather"
LITDATA, MOSAIC = "litdata", "MosaicML streaming"
DATASETS_TORCH, DATASETS_NUMPY = "datasets, torch format", "datasets, numpy format"
GRAIN, TENSORFLOW = "Grain, MapDataset over numpy", "TensorFlow, tf.data over fixed-length records"

RESUME = f"resume at step {FAR_STEP:.0e}".replace("+0", "")
MEMORY_WIRE, MEMORY_TORCH = "memory, wire", f"memory, {COMPLETE}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """What all subjects read: our store, and its concat rows as one flat file in `folder`.

    Attributes:
        num_rows: full rows.
        num_batches: per pass, by batch size.
    """

    folder: Path
    store: str
    seq_len: int
    dtype: str
    end_id: int
    device: str
    num_tokens: int
    num_rows: int
    num_batches: dict[int, int]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows per batch, the size that is judged first."""
        return tuple(self.num_batches)

    @classmethod
    def pretended(cls, folder: Path, *, seq_len: int, batch_sizes: tuple[int, ...]) -> Data:
        """Data that isn't there, for the names of the subjects."""
        return cls(
            folder=folder,
            store="",
            seq_len=seq_len,
            dtype="uint16",
            end_id=0,
            device="cpu",
            num_tokens=0,
            num_rows=0,
            num_batches=dict.fromkeys(batch_sizes, 0),
        )

    def timing(self, batch_size: int, *, own: bool) -> dict[str, Any]:
        """Settings of `loading.Timing`."""
        shape = {
            "seq_len": self.seq_len,
            "batch_size": batch_size,
            "num_batches": self.num_batches[batch_size],
            "device": self.device,
        }
        if own:
            return {**shape, "passes": OWN_PASSES}
        return {**shape, "passes": OTHER_PASSES, "longest_pass_seconds": OTHER_PASS_SECONDS}

    @property
    def rows(self) -> dict[str, Any]:
        """Settings of a task that reads the flat file."""
        return {"rows": str(self.folder / "rows"), "dtype": self.dtype}

    def written(self, out: str) -> dict[str, Any]:
        """Settings of a task that writes the flat file in another format."""
        return {**self.rows, "seq_len": self.seq_len, "out": out}


def of_size(name: str, batch_size: int) -> str:
    """A subject's name at a batch size."""
    return f"{name}, batch {batch_size}"


def shuffle_of(name: str) -> str:
    """The name of an order's figure."""
    return f"shuffle, {name}"


def opening(num_tokens: int, *, cached: bool) -> str:
    """The name of the figure for a large store."""
    return f"open and first batch, {num_tokens:.3g} tokens, {'page cache warm' if cached else 'nothing cached'}"


def rate_subjects(data: Data, batch_size: int) -> list[Subject]:
    """Everybody who gives batches."""
    return [
        *_own(data, batch_size),
        *_frameworks(data, batch_size),
        *_numpy(data, batch_size),
        *_peers(data, batch_size),
    ]


def _own(data: Data, batch_size: int) -> list[Subject]:
    common = {"timing": data.timing(batch_size, own=True), "store": data.store}

    def subject(name: str, task: str, prefetch_batches: int | None, **settings: Any) -> Subject:
        settings = {**common, "prefetch_batches": prefetch_batches, **settings}
        return Subject(name=of_size(name, batch_size), role=Role.OURS, task=f"loading:{task}", settings=settings)

    return [
        subject(WIRE_THREAD, "load_wire", PREFETCH_BATCHES, policy="concat"),
        subject(WIRE_DEMAND, "load_wire", 0, policy="concat"),
        subject(WIRE_BEST_FIT, "load_wire", PREFETCH_BATCHES, policy="best-fit"),
        subject(TORCH_TOKENS, "load_torch", PREFETCH_BATCHES, everything=False),
        subject(TORCH_THREAD, "load_torch", PREFETCH_BATCHES, everything=True),
        subject(TORCH_DEMAND, "load_torch", 0, everything=True),
    ]


def _frameworks(data: Data, batch_size: int) -> list[Subject]:
    common = {"timing": data.timing(batch_size, own=False), "store": data.store}
    fields = "tokens, labels and positions"

    def subject(name: str, task: str, **settings: Any) -> Subject:
        return Subject(
            name=of_size(f"penstock, {name}", batch_size),
            role=Role.OURS,
            task=f"loading_frameworks:{task}",
            settings={**common, **settings},
            environment=QUIET,
        )

    return [
        subject(f"DataLoader over RowDataset, {COMPLETE}", "load_data_loader", data_set="RowDataset"),
        subject(f"DataLoader over RowStream, {COMPLETE}", "load_data_loader", data_set="RowStream"),
        subject("JAX, int32 tokens, labels, positions and document ids", "load_jax"),
        subject(f"Grain, numpy int32 {fields}", "load_grain"),
        subject(f"TensorFlow, tf.data int64 {fields}", "load_tensorflow"),
    ]


def _numpy(data: Data, batch_size: int) -> list[Subject]:
    common = {**data.rows, "timing": data.timing(batch_size, own=True), "end_id": data.end_id}
    return [
        Subject(
            name=of_size(name, batch_size),
            role=Role.CEILING,
            task="loading:gather_with_numpy",
            settings={**common, "as_torch": name == NUMPY_TORCH},
        )
        for name in (NUMPY_WIRE, NUMPY_TORCH)
    ]


def _peers(data: Data, batch_size: int) -> list[Subject]:
    """litdata in int64 and in the narrowest type it knows, with and without workers; the others at their best."""
    common = {"timing": data.timing(batch_size, own=False), "end_id": data.end_id}

    def subject(name: str, task: str, setup: tuple[str, dict[str, Any]] | None, **settings: Any) -> Subject:
        return Subject(
            name=of_size(name, batch_size),
            role=Role.PEER,
            task=f"loading_peers:{task}",
            settings={**common, **settings},
            environment=QUIET,
            setup=[] if setup is None else [setup],
            repeats=1 if settings.get("num_workers") else None,
        )

    # torch has the store's 16-bit type but not its 32-bit one; ids of either fit 32 bits with a sign.
    widths = ("int64", "uint16" if data.dtype == "uint16" else "int32")
    litdata = [
        subject(
            f"{LITDATA}, {width} on disk, {workers or 'no'} workers",
            "load_litdata",
            _litdata_setup(data, width),
            folder=str(data.folder / f"litdata-{width}"),
            num_workers=workers,
        )
        for width, workers in ((widths[0], 0), (widths[1], 0), (widths[0], 2))
    ]
    datasets = [
        subject(
            name,
            "load_datasets",
            ("loading_peers:write_datasets", data.written(str(data.folder / "datasets"))),
            folder=str(data.folder / "datasets"),
            row_format=row_format,
        )
        for name, row_format in ((DATASETS_TORCH, "torch"), (DATASETS_NUMPY, "numpy"))
    ]
    return [
        *litdata,
        subject(MOSAIC, "load_mosaic", _mosaic_setup(data), folder=str(data.folder / "mosaic")),
        *datasets,
        subject(GRAIN, "load_grain", None, **data.rows),
        subject(TENSORFLOW, "load_tensorflow", None, **data.rows),
    ]


def _litdata_setup(data: Data, width: str) -> tuple[str, dict[str, Any]]:
    return "loading_peers:write_litdata", {**data.written(str(data.folder / f"litdata-{width}")), "wanted": width}


def _mosaic_setup(data: Data) -> tuple[str, dict[str, Any]]:
    return "loading_peers:write_mosaic", data.written(str(data.folder / "mosaic"))


def figure_subjects(data: Data, *, large_tokens: int) -> list[Subject]:
    """Everything that isn't a rate; once for each batch size where that changes it."""
    first = data.batch_sizes[0]
    shape = {"store": data.store, "seq_len": data.seq_len, "batch_size": first}
    subjects = [
        Subject(name=RESUME, role=Role.OURS, task="loading_figures:resume_far", settings={**shape, "step": FAR_STEP})
    ]
    if large_tokens:
        subjects += _large(data, large_tokens)
    for size in data.batch_sizes:
        least, most = MEMORY_BATCHES
        count = min(max(MEMORY_TOKENS // (size * data.seq_len), least), most)
        batches = {**shape, "batch_size": size, "num_batches": count}
        subjects += [
            Subject(
                name=of_size(name, size),
                role=Role.OURS,
                task="loading_memory:measure_memory",
                settings={**batches, "as_torch": name == MEMORY_TORCH},
                repeats=1,
            )
            for name in (MEMORY_WIRE, MEMORY_TORCH)
        ]
    return [*subjects, *_orders(data)]


def _large(data: Data, large_tokens: int) -> list[Subject]:
    out = str(data.folder / "large")
    settings = {"store": out, "seq_len": data.seq_len, "batch_size": data.batch_sizes[0]}
    written = {"tokenizer_of": data.store, "num_tokens": large_tokens, "out": out}
    return [
        Subject(
            name=opening(large_tokens, cached=cached),
            role=Role.OURS,
            task="loading_figures:open_and_load",
            settings={**settings, "cached": cached},
            setup=[("drawn_store:write_drawn_store", written)],
        )
        for cached in (True, False)
    ]


def _orders(data: Data) -> list[Subject]:
    """Of each shuffle one pass; an order doesn't change from one repeat to the next."""
    common = {"num_rows": data.num_rows, "batch_size": data.batch_sizes[0]}

    def subject(
        name: str, task: str, role: Role = Role.PEER, setup: tuple[str, dict[str, Any]] | None = None, **settings: Any
    ) -> Subject:
        return Subject(
            name=shuffle_of(name),
            role=role,
            task=f"loading_orders:{task}",
            settings={**common, **settings},
            environment=QUIET,
            setup=[] if setup is None else [setup],
            repeats=1,
        )

    litdata, mosaic = str(data.folder / "litdata-int64"), str(data.folder / "mosaic")
    return [
        subject("penstock", "order_of_ours", Role.OURS),
        subject(LITDATA, "order_of_litdata", setup=_litdata_setup(data, "int64"), folder=litdata, seq_len=data.seq_len),
        subject(MOSAIC, "order_of_mosaic", setup=_mosaic_setup(data), folder=mosaic),
        subject("datasets", "order_of_datasets"),
        subject("Grain", "order_of_grain"),
        subject("TensorFlow tf.data", "order_of_tensorflow"),
    ]
