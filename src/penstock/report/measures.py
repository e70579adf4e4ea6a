"""Figures derived from a run: rates, medians, losses, epochs, memory.

In: a `Run`. Out: plain numbers and JSON-ready dicts, None where the records hold nothing to derive them from; the
manifest, the page and the summary all take theirs from here, so that they can't disagree. Cost: linear in the steps,
plus a sort for medians.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from penstock.report.fields import finite, line_of, mapping, sequence, whole
from penstock.report.run import Evaluation, Run, Step
from penstock.runlog import Record

__all__ = [
    "BYTES_PER_MB",
    "COLLECTION_INTERVAL_SECONDS",
    "TRAINING_PHASE",
    "data_stall_percent",
    "device_name",
    "epoch_summaries",
    "gradient_summary",
    "hardware_summary",
    "loss_change",
    "parameters",
    "sequence_metadata",
    "steps_done",
    "stored",
    "timing",
    "tokens_per_second",
    "tokens_trained",
    "training_detail",
    "validation_split",
    "validations",
]

COLLECTION_INTERVAL_SECONDS = 5
BYTES_PER_MB = 1e6
GPU_FIGURES = (
    "power_watts",
    "utilization_percent",
    "sm_active_percent",
    "tensor_active_percent",
    "dram_active_percent",
)
TRAINING_PHASE = "train"

PARAMETER_NAMES = (
    "total_steps",
    "warmup_steps",
    "epochs",
    "steps_per_epoch",
    "batch_size",
    "batch_rows",
    "gradient_accumulation_steps",
    "seq_len",
    "num_sequences",
    "target_tokens",
    "parameters",
    "learning_rate",
    "schedule",
    "weight_decay",
    "max_grad_norm",
    "num_workers",
    "device",
    "dtype",
    "seed",
)
# The names that the manifest's readers know, beside ours. As with them, batch_size times gradient_accumulation_steps
# is the batch of a step in one process; over all of them it is batch_rows.
NAMES_OF_SETTINGS = {"steps": "total_steps", "micro_batch_rows": "batch_size"}
NAMES_OF_DETAIL = {"train_rows": "num_sequences"}
NAMES_OF_LENGTH = {"steps": "total_steps", "rows_per_pass": "num_sequences"}
SEQUENCE_NAMES = ("seq_len", "pack", "overlap", "document_boundaries", "rows_per_pass", "tokens_per_pass")


def parameters(run: Run) -> dict[str, Any]:
    """The settings trained with. What was used outranks what was asked for: detail, then choices, then the config."""
    used = _renamed(run.settings, NAMES_OF_SETTINGS)
    used |= _renamed({choice.name: choice.value for choice in run.choices}, NAMES_OF_SETTINGS)
    for phase in run.phases:
        used |= _renamed(phase.detail, NAMES_OF_DETAIL)
    used |= _renamed(run.length, NAMES_OF_LENGTH)
    found = {name: used[name] for name in PARAMETER_NAMES if used.get(name) is not None}
    if "seq_len" not in found and run.rows:
        found["seq_len"] = run.rows[-1].get("seq_len")
    return found | {"steps_done": steps_done(run)}


def sequence_metadata(run: Run) -> dict[str, Any]:
    """What a row is, and what a pass over the rows holds."""
    used = run.settings | run.length
    found = {name: used[name] for name in SEQUENCE_NAMES if used.get(name) is not None}
    if "seq_len" not in found and run.rows:
        found["seq_len"] = run.rows[-1].get("seq_len")
    return found


def training_detail(run: Run) -> dict[str, Any]:
    """What the training phase counted."""
    return next((phase.detail for phase in run.phases if phase.name == TRAINING_PHASE), {})


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items() if value is not None}


def steps_done(run: Run) -> int:
    """Updates done; not the number of step records, as a run may record every tenth only."""
    return run.steps[-1].step if run.steps else 0


def validation_split(run: Run) -> str | None:
    """The split whose loss is followed: `val` where it was evaluated, else the one evaluated most often."""
    splits = [evaluation.split for evaluation in run.evaluations]
    return "val" if "val" in splits else max(splits, key=splits.count, default=None)


def validations(run: Run) -> list[Evaluation]:
    """The evaluations of that split, by step."""
    split = validation_split(run)
    return [one for one in run.evaluations if one.split == split and one.store is None]


def loss_change(run: Run) -> tuple[float, float] | None:
    """First and last finite training loss."""
    losses = [step.loss for step in run.steps if step.loss is not None]
    return (losses[0], losses[-1]) if losses else None


def tokens_trained(run: Run) -> float | None:
    """Real tokens of all steps: as the training phase counted them, else the sum where every step has its record."""
    for phase in run.phases:
        counted = finite(phase.detail.get("tokens"))
        if phase.name == TRAINING_PHASE and counted is not None:
            return counted
    if len(run.steps) < steps_done(run):
        return None
    return sum(step.tokens or 0 for step in run.steps)


def stored(run: Run) -> tuple[int, int] | None:
    """Documents and tokens of all stores together; None where those of one aren't recorded."""
    tokens = [store.tokens for store in run.stores if store.tokens is not None]
    if not tokens or len(tokens) < len(run.stores):
        return None
    return sum(store.documents or 0 for store in run.stores), sum(tokens)


def _timed(run: Run) -> list[tuple[Step, float]]:
    return [(step, step.seconds) for step in run.steps if step.seconds is not None and step.seconds > 0]


def tokens_per_second(run: Run) -> float | None:
    """Tokens of all timed steps over their seconds; slow first steps included."""
    seconds = sum(seconds for _, seconds in _timed(run))
    tokens = sum(step.tokens or 0 for step, _ in _timed(run))
    return tokens / seconds if seconds and tokens else None


def data_stall_percent(run: Run) -> float | None:
    """The share of step time spent waiting for data."""
    waited = [(step.data_seconds, seconds) for step, seconds in _timed(run) if step.data_seconds is not None]
    total_seconds = sum(seconds for _, seconds in waited)
    return 100 * sum(data_seconds for data_seconds, _ in waited) / total_seconds if total_seconds else None


def timing(run: Run) -> dict[str, float | None]:
    """Speed of the steps; the 95th percentile is the nearest rank."""
    spread = sorted(seconds for _, seconds in _timed(run))
    rate_of_steps = [step.tokens / seconds for step, seconds in _timed(run) if step.tokens]
    return {
        "tokens_per_second": tokens_per_second(run),
        "tokens_per_second_median": median(rate_of_steps) if rate_of_steps else None,
        "step_seconds_median": median(spread) if spread else None,
        "step_seconds_p95": spread[math.ceil(0.95 * len(spread)) - 1] if spread else None,
        "data_stall_percent": data_stall_percent(run),
        "mfu_percent_median": _median(step.mfu_percent for step in run.steps),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def gradient_summary(run: Run) -> dict[str, float | int | None]:
    """Largest, median and last gradient norm before clipping."""
    norms = [step.grad_norm for step in run.steps if step.grad_norm is not None]
    return {
        "norm_max": max(norms, default=None),
        "norm_median": median(norms) if norms else None,
        "norm_final": norms[-1] if norms else None,
        "steps_without_finite_loss": sum(step.loss is None for step in run.steps),
    }


def device_name(run: Run) -> str | None:
    """What the model ran on, with the name of the processor or card where it is known."""
    device = line_of(next((choice.value for choice in run.choices if choice.name == "device"), None))
    gpus = [mapping(gpu) for gpu in sequence(run.hardware.get("gpus"))]
    if device.startswith("cuda") or (not device and gpus):
        name = line_of(gpus[0].get("name")) if gpus else ""
    else:
        name = line_of(run.hardware.get("cpu_name"))
    return f"{device} ({name})" if device and name else device or name or None


def hardware_summary(run: Run) -> dict[str, Any]:
    """Peaks and means over the hardware samples."""
    memory = [value for sample in run.hardware_samples if (value := finite(sample.get("memory_bytes"))) is not None]
    busy = [value for sample in run.hardware_samples if (value := finite(sample.get("cpu_percent"))) is not None]
    gpus = [mapping(gpu) for sample in run.hardware_samples for gpu in sequence(sample.get("gpu"))]
    # The peak between two samples where the device keeps one, else what was seen at a sample.
    held = [finite(gpu.get("peak_memory_bytes")) or finite(gpu.get("memory_bytes")) for gpu in gpus]
    gpu_memory = [value for value in held if value is not None]
    interval = finite(run.settings.get("hardware_interval_seconds"))
    return {
        "device": device_name(run),
        "collection_interval_seconds": interval or COLLECTION_INTERVAL_SECONDS,
        "samples": len(run.hardware_samples),
        "peak_memory_mb": max(memory) / BYTES_PER_MB if memory else None,
        "peak_gpu_memory_mb": max(gpu_memory) / BYTES_PER_MB if gpu_memory else None,
        "mean_cpu_percent": sum(busy) / len(busy) if busy else None,
        **_gpu_means(gpus),
    }


def _gpu_means(gpus: list[dict[str, Any]]) -> dict[str, float]:
    """Power and activity over all samples and GPUs, where a card tells them."""
    means = {}
    for name in GPU_FIGURES:
        values = [value for gpu in gpus if (value := finite(gpu.get(name))) is not None]
        if values:
            means[f"mean_gpu_{name}"] = sum(values) / len(values)
    return means


def epoch_summaries(run: Run) -> list[dict[str, Any]]:
    """One entry for each pass over the rows, the last perhaps unfinished; empty where the row count isn't recorded.

    As the trainer summed them up; passes that it didn't come to sum up are counted from the steps' records.
    """
    recorded = {epoch: _recorded_epoch(record) for record in run.epochs if (epoch := whole(record.get("epoch")))}
    counted = {one["epoch"]: one for one in _counted_epochs(run)}
    last = max(recorded, default=0)
    return list((recorded | {epoch: one for epoch, one in counted.items() if epoch > last}).values())


def _recorded_epoch(record: Record) -> dict[str, Any]:
    numbers = ("mean_train_loss", "val_loss", "tokens", "seconds", "tokens_per_second", "learning_rate")
    return {
        "epoch": whole(record.get("epoch")),
        "complete": record.get("complete") is True,
        "first_step": whole(record.get("first_step")),
        "last_step": whole(record.get("step")),
        **{name: finite(record.get(name)) for name in numbers},
    }


def _counted_epochs(run: Run) -> list[dict[str, Any]]:
    num_rows = whole(parameters(run).get("num_sequences"))
    if not num_rows or num_rows < 1:
        return []
    batch_rows = whole(parameters(run).get("batch_rows")) or 1
    by_epoch: dict[int, list[Step]] = {}
    for step in run.steps:
        if step.position:
            # A batch may straddle two passes; it counts where its first row lies.
            first_row = max(step.position - batch_rows, 0)
            by_epoch.setdefault(first_row // num_rows + 1, []).append(step)
    return [_epoch_summary(run, epoch, steps, num_rows=num_rows) for epoch, steps in sorted(by_epoch.items())]


def _epoch_summary(run: Run, epoch: int, steps: list[Step], *, num_rows: int) -> dict[str, Any]:
    weighed = [(step.loss, step.tokens or 1) for step in steps if step.loss is not None]
    weight = sum(tokens for _, tokens in weighed)
    last_step = steps[-1].step
    seen = [one for one in validations(run) if steps[0].step <= one.step <= last_step]
    tokens, seconds = sum(step.tokens or 0 for step in steps), sum(step.seconds or 0 for step in steps)
    return {
        "epoch": epoch,
        "complete": (steps[-1].position or 0) >= epoch * num_rows or last_step != run.steps[-1].step,
        "first_step": steps[0].step,
        "last_step": last_step,
        "mean_train_loss": sum(loss * tokens for loss, tokens in weighed) / weight if weight else None,
        "val_loss": seen[-1].loss if seen else None,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "learning_rate": steps[-1].learning_rate,
    }
