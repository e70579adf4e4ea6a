"""The manifest of a run: one JSON file that programs read.

In: the records of a run, finished, failed or killed. Out: `RUN/manifest.json`, written whole or not at all. It is
written on failure too and then names the phase that failed. Figures that the records don't hold are null, as are losses
that were not finite: JSON has no NaN. Cost: a few passes over the records; about 30 bytes a step on disk.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.report import measures, quantities
from penstock.report.run import Phase, Run, read_run_records
from penstock.runlog import RECORDS_NAME, Record

__all__ = ["MANIFEST_NAME", "PAGE_NAME", "SCHEMA_VERSION", "build_manifest", "write_manifest"]

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
PAGE_NAME = "report.html"
STORE_NAMES = ("name", "path", "version", "digest", "documents", "tokens")


def write_manifest(run_folder: Path, records: Sequence[Record] | None = None) -> Path:
    """Writes `RUN/manifest.json` and returns its path; reads the folder's records where none are given."""
    manifest = build_manifest(read_run_records(run_folder) if records is None else records)
    path = run_folder / MANIFEST_NAME
    # Pure ASCII, so that no reader's encoding and no lone surrogate of a file name can spoil it.
    data = json.dumps(manifest, indent=2, ensure_ascii=True, allow_nan=False).encode() + b"\n"
    with fs.fail_as_disk_error("writing the manifest"):
        fs.write_atomic(path, data)
    return path


def build_manifest(records: Sequence[Record]) -> dict[str, Any]:
    """What the records say, under the keys that others rely on."""
    run = Run.from_records(records)
    manifest: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "status": run.status,
        "message": run.message or None,
        "failed_phase": run.failed_phase,
        "command": run.command,
        "version": run.version,
        "python": run.python,
        "platform": run.platform,
        "execution_timestamp": quantities.moment(run.started) if run.started is not None else None,
        "total_execution_time_seconds": round(run.seconds, 3),
        "num_starts": run.num_starts,
        "hardware": run.hardware,
        "choices": [dataclasses.asdict(choice) for choice in run.choices],
        "store": _store(run),
        "stores": [{name: getattr(store, name) for name in STORE_NAMES} for store in run.stores],
        "mixture": [dataclasses.asdict(source) for source in run.mixture] or None,
        "repository_stats": run.repository or None,
        "training_parameters": measures.parameters(run),
        "sequence_metadata": measures.sequence_metadata(run),
        "phase_results": {phase.name: _phase_result(phase) for phase in run.phases},
        "training_report": _training_report(run),
        "files": {
            "records": RECORDS_NAME,
            "checkpoint": run.checkpoints[-1].path if run.checkpoints else None,
            "best_checkpoint": measures.training_detail(run).get("best_checkpoint"),
            "report": PAGE_NAME,
        },
    }
    return {key: _without_nan(value) for key, value in manifest.items()}


def _store(run: Run) -> dict[str, Any] | None:
    """The first store, with all that is known of it."""
    if not run.stores:
        return None
    facts = dataclasses.asdict(run.stores[0])
    facts["bytes"] = facts.pop("num_bytes")
    return facts


def _phase_result(phase: Phase) -> dict[str, Any]:
    """Detail first: a figure of that name in it can't hide the phase's own status."""
    return {**phase.detail, "status": phase.status, "duration_seconds": phase.seconds}


def _training_report(run: Run) -> dict[str, Any]:
    change = measures.loss_change(run)
    validations = measures.validations(run)
    last = validations[-1] if validations else None
    detail = measures.training_detail(run)
    return {
        "training": {
            "first_train_loss": change[0] if change else None,
            "final_train_loss": change[1] if change else None,
            "final_val_loss": last.loss if last else None,
            "final_val_bits_per_byte": last.bits_per_byte if last else None,
            "best_val_loss": detail.get("best_val_loss"),
            "best_step": detail.get("best_step"),
            "stop_reason": detail.get("stop_reason"),
            "tokens": measures.tokens_trained(run),
            "evaluations": [dataclasses.asdict(evaluation) for evaluation in run.evaluations],
            "epoch_summaries": measures.epoch_summaries(run),
        },
        "learning_rate": {"history": [step.learning_rate for step in run.steps]},
        "gradients": measures.gradient_summary(run),
        "hardware": measures.hardware_summary(run),
        "timing": measures.timing(run),
    }


def _without_nan(value: Any) -> Any:
    """The value as plain JSON: NaN and infinities are null, anything foreign is text."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
