"""The record of a run: what happened, when, how fast, and why it was chosen so.

In: calls of `RunLog.append` from any stage. Out: `RUN/records.jsonl`, one JSON object a line, only ever appended to.
`read_records` is for report/: it drops a torn last line (the process was killed while writing it). Costs one small
write per record; `flush` makes it durable at the borders that matter (phase ends, checkpoints).

Kinds and their fields (all have `kind` and `time`, seconds since the epoch):
    start       command, version, python, platform, hardware, config{}
    phase       name, status ok|failed, seconds, detail{}
    choice      name, value, reason, gain (where measured, a share of speed)
    trial       attention, micro_batch_rows, loss_kernel, compile, tokens_per_second, first_seconds, peak_bytes, failure
    adapted     key, value, outcome, detail      (a key of settings written for another trainer)
    data        store, store_version, digest, documents, tokens, bytes, splits{}, skipped{}, statistics{}, repository{};
                of a mixture that of its first store, mixture{} and stores[{name, store, version, digest, …}]
    rows        split, seq_len, rows[{row, documents[], text}]; of a mixture one record a source, with its name
    length      steps, rows_per_pass, tokens_per_pass, epochs, steps_per_epoch, warmup_steps, reason
    step        step, loss, learning_rate, grad_norm, tokens, seconds, data_seconds, position, mfu_percent (where known)
    epoch       epoch, step, first_step, complete, mean_train_loss, val_loss, tokens, seconds, tokens_per_second,
                learning_rate
    evaluation  step, split, store (one of several), loss, bits_per_byte, tokens, seconds
    checkpoint  step, path, bytes, seconds, waited_seconds (how long training stood still for it)
    sample      step, prompt, text
    hardware    cpu_percent, memory_bytes, gpu[]
    event       message            (warnings, resumes, skipped updates)
    end         status completed|failed|interrupted, message
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock import fs
from penstock.errors import InputError

RECORDS_NAME = "records.jsonl"

__all__ = ["RECORDS_NAME", "Record", "RunLog", "latest_by_step", "read_records"]

Record = dict[str, Any]


class RunLog:
    """Appends records to `RUN/records.jsonl`; a context manager that closes the file."""

    def __init__(self, run_folder: Path) -> None:
        fs.make_folder(run_folder)
        self._file = fs.AppendOnlyFile(run_folder / RECORDS_NAME)

    def append(self, kind: str, **fields: Any) -> Record:
        """Writes one record and returns it."""
        record = {"kind": kind, "time": round(time.time(), 3), **fields}
        self._file.write(json.dumps(record, ensure_ascii=True, allow_nan=True).encode() + b"\n")
        return record

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Times a phase; the caller fills the yielded dict with its figures. A failure is recorded, then raised."""
        detail: dict[str, Any] = {}
        started = time.perf_counter()
        try:
            yield detail
        except BaseException:
            with suppress(OSError):  # a full disk must not hide why the phase failed
                self._end_phase(name, status="failed", started=started, detail=detail)
            raise
        self._end_phase(name, status="ok", started=started, detail=detail)

    def _end_phase(self, name: str, *, status: str, started: float, detail: dict[str, Any]) -> None:
        seconds = round(time.perf_counter() - started, 4)
        self.append("phase", name=name, status=status, seconds=seconds, detail=detail)
        self.flush()

    def flush(self) -> None:
        """Makes everything appended so far durable."""
        self._file.sync()

    def close(self) -> None:
        """Makes the records durable and closes the file."""
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # While an error is on its way out, a second one from closing must not take its place.
        with suppress(OSError) if error is not None else nullcontext():
            self.close()


def read_records(run_folder: Path) -> list[Record]:
    """All whole records of a run, in the order written; a damaged line is an `InputError`."""
    path = run_folder / RECORDS_NAME
    if not path.exists():
        return []
    # What follows the last newline was cut off by a kill; a whole record always ends in one.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_record(line, path=path, number=number) for number, line in enumerate(lines, start=1)]


def _record(line: bytes, *, path: Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return record
    raise InputError(
        f"line {number} of {path} is not a record: met {line[:60]!r}, expected a JSON object",
        hint=f"the file was damaged or edited; remove that line: sed -i {number}d {path}",
    )


def latest_by_step(records: list[Record], kind: str) -> list[Record]:
    """The records of a kind by step, the last one where a resumed run repeated a step.

    One step may have several evaluations (one a split) and samples (one a prompt); each is kept.
    """
    latest: dict[tuple[int, str], Record] = {}
    for record in records:
        if record.get("kind") == kind:
            which = repr([record.get(name) for name in ("split", "store", "prompt", "epoch")])
            latest[record["step"], which] = record
    return sorted(latest.values(), key=lambda record: record["step"])
