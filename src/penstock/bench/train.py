"""`bench train`: our trainer against a loop written by hand and Hugging Face's Trainer, on the same model and tokens.

Ours is `penstock train` without a tuning flag. The peers train the same architecture as it is exported, in the same
shapes with the same padded vocabulary, from the same tokens; Trainer runs with its defaults (batch of 8, float32) and
tuned by hand (bf16, TF32, compile, fused AdamW, our batch, workers; on a CPU what of that makes sense there). Ceilings:
our own loop on one batch that is already there, and the device's rate on one large product. The default is a tiny model
that a CPU trains in two minutes, to prove the code; the figures that matter come from benchmarks/gpu_train.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.processes import Outcome, Subject, Tell, measured, row_of, run_own
from penstock.bench.result import BenchResult, Ratio, Role, Row, ratio
from penstock.bench.stores import store_path
from penstock.bench.training import WARM_UP_STEPS
from penstock.errors import ConfigError
from penstock.sources import STANDARD_LIBRARY

__all__ = ["Case", "Options", "result_of", "run", "subjects_of"]

OURS = "penstock train"
OURS_UNMASKED = "penstock train, document masks off"
OURS_FLOAT8 = "penstock train, float8"
SAME_BATCH = "penstock train on one batch, nothing loaded"
PLAIN = "plain loop, tuned by hand"
TRAINER = "Trainer, defaults"
TRAINER_TUNED = "Trainer, tuned by hand"
MATMUL = "one large product"
TRAINER_DEFAULT_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model trained by several.

    Attributes:
        preset: of the built-in decoder.
        overrides: further settings of ours, which the exported architecture follows.
        steps: per measurement, of which `warm_up_steps` aren't timed.
        has_gpu: whether the peers' settings are those for a GPU.
        workers: of Trainer's loader, tuned by hand.
        timeout_seconds: of one measurement.
        planned_steps: what ours is told that the run has; it stops after `steps`. Whether compiling pays back, and what
            else is chosen, depends on a run's length, and a benchmark of a minute stands for a run of hours.
    """

    preset: str
    seq_len: int
    batch_size: int
    steps: int
    warm_up_steps: int
    has_gpu: bool
    workers: int
    overrides: tuple[str, ...] = ()
    timeout_seconds: float | None = None
    planned_steps: int | None = None

    def settings(self, **changes: Any) -> list[str]:
        """Ours as `--set` would be given."""
        settings = {
            "model.preset": self.preset,
            "steps": self.planned_steps or self.steps,
            "stop_after_steps": self.steps if self.planned_steps else "null",
            "batch_rows": self.batch_size,
            "seq_len": self.seq_len,
            "eval_every_steps": "null",
            "eval_rows": 1,
            "checkpoint_every_steps": "null",
            "sample_tokens": 0,
            **changes,
        }
        return [*(f"{key}={value}" for key, value in settings.items()), *self.overrides]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The tokens for all sides: our store, and the same as one flat file."""

    store: str
    tokens: str
    dtype: str
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        store: an existing store; None prepares the inputs into a temporary one.
        inputs: the corpus.
        tokenizer: for the corpus; None trains 8,192 tokens on it.
        preset: of the built-in model.
        steps: per run, of which the first few aren't timed.
        batch_size: rows per step.
        seq_len: tokens per row.
        repeats: rounds; the median counts.
        skip: subjects to leave out, by name or a word of it.
    """

    store: str | None = None
    inputs: tuple[str, ...] = field(default=(STANDARD_LIBRARY,), metadata={"flag": "input"})
    tokenizer: str | None = None
    preset: str = "tiny"
    steps: int = 12
    batch_size: int = 16
    seq_len: int = 128
    repeats: int = 2
    skip: tuple[str, ...] = ()


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures all and compares."""
    if options.steps <= WARM_UP_STEPS:
        raise ConfigError(
            f"--steps {options.steps} leaves nothing to time", hint=f"give more than {WARM_UP_STEPS} steps"
        )
    from penstock.hardware import default_workers, probe

    hardware = probe()
    case = Case(
        preset=options.preset,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        steps=options.steps,
        warm_up_steps=WARM_UP_STEPS,
        has_gpu=bool(hardware.gpus),
        workers=min(8, max(1, default_workers(hardware) // 2)),
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        store = store_path(options.store, inputs=options.inputs, tokenizer=options.tokenizer, folder=folder, tell=tell)
        data = data_of(store, folder)
        subjects = subjects_of(case, data)
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    return result_of("train", case, data, outcomes, repeats=options.repeats)


def data_of(store: str, folder: Path) -> Data:
    """The store's tokens as the peers read them."""
    tokens = str(folder / "tokens.bin")
    written = run_own("training_peers:write_tokens", {"store": store, "out": tokens}, folder=folder)
    return Data(store=store, tokens=tokens, dtype=written["dtype"], vocab_size=written["vocab_size"])


def subjects_of(case: Case, data: Data) -> list[Subject]:
    """Ours, the ceilings and the peers, in the order of a round."""
    return [
        our_subject(OURS, case, data),
        trainer_subject(TRAINER_TUNED, case, data, batch_size=case.batch_size, arguments=tuned_arguments(case)),
        our_subject(OURS_UNMASKED, case, data, document_boundaries=False),
        trainer_subject(TRAINER, case, data, batch_size=TRAINER_DEFAULT_BATCH, arguments={}),
        Subject(name=MATMUL, role=Role.CEILING, task="training:matmul_rate", settings={}, repeats=1),
        plain_subject(case, data),
        our_subject(SAME_BATCH, case, data, role=Role.CEILING, task="training:same_batch_steps"),
    ]


def our_subject(
    name: str, case: Case, data: Data, *, role: Role = Role.OURS, task: str = "training:train_steps", **changes: Any
) -> Subject:
    """Our trainer, with some settings changed; a ceiling is measured once."""
    overrides = case.settings(**{key.replace("__", "."): value for key, value in changes.items()})
    settings = {"store": data.store, "overrides": overrides, "warm_up_steps": case.warm_up_steps}
    return Subject(
        name=name,
        role=role,
        task=task,
        settings=settings,
        repeats=1 if role is Role.CEILING else None,
        timeout_seconds=case.timeout_seconds,
    )


def shape_of(case: Case, data: Data) -> dict[str, Any]:
    """The architecture that everybody trains."""
    from penstock.train import load_config

    config = load_config(None, case.settings())
    return asdict(config.model.shape(vocab_size=data.vocab_size, seq_len=case.seq_len))


def peer_settings(case: Case, data: Data, *, batch_size: int) -> dict[str, Any]:
    """What every peer is told."""
    return {
        "tokens": data.tokens,
        "dtype": data.dtype,
        "seq_len": case.seq_len,
        "batch_size": batch_size,
        "steps": case.steps,
        "warm_up_steps": case.warm_up_steps,
    }


def plain_subject(case: Case, data: Data) -> Subject:
    """The loop written by hand."""
    settings = {
        **peer_settings(case, data, batch_size=case.batch_size),
        "shape": shape_of(case, data),
        "learning_rate": 6e-4,
    }
    return Subject(
        name=PLAIN,
        role=Role.PEER,
        task="training_peers:plain_loop_steps",
        settings=settings,
        timeout_seconds=case.timeout_seconds,
    )


def trainer_subject(name: str, case: Case, data: Data, *, batch_size: int, arguments: Mapping[str, Any]) -> Subject:
    """Hugging Face's Trainer."""
    settings = {
        **peer_settings(case, data, batch_size=batch_size),
        "shape": shape_of(case, data),
        "arguments": dict(arguments),
    }
    return Subject(
        name=name,
        role=Role.PEER,
        task="training_peers:trainer_steps",
        settings=settings,
        timeout_seconds=case.timeout_seconds,
    )


def tuned_arguments(case: Case, *, compile_model: bool = True) -> dict[str, Any]:
    """What one sets on Trainer by hand; a CPU has neither TF32 nor fast bf16, and compiling costs it minutes."""
    loader = {"dataloader_num_workers": case.workers, "dataloader_persistent_workers": True, "learning_rate": 6e-4}
    if not case.has_gpu:
        return loader
    return {
        **loader,
        "bf16": True,
        "tf32": True,
        "torch_compile": compile_model,
        "optim": "adamw_torch_fused",
        "dataloader_prefetch_factor": 4,
    }


def result_of(
    benchmark: str,
    case: Case,
    data: Data,
    outcomes: Mapping[str, Outcome],
    *,
    repeats: int,
    ratios: Sequence[Ratio] | None = None,
) -> BenchResult:
    """Rows of all that was measured, and the ratios between them."""
    rows = rows_of(outcomes)
    return BenchResult(
        benchmark=benchmark,
        settings=described(case, data, outcomes, repeats=repeats),
        rows=list(rows.values()),
        ratios=usual_ratios(rows, outcomes) if ratios is None else ratios,
    )


# Key of a report -> what a row is called, and its unit.
FIGURES = {
    "tokens_per_second": ("", "tokens/s"),
    "mfu_percent": ("MFU", "% of the dense bf16 peak"),
    "model_teraflops": ("model FLOP/s", "TFLOP/s"),
    "sm_active_percent": ("SM activity (NVML GPM)", "%"),
    "tensor_active_percent": ("tensor activity (NVML GPM)", "%"),
    "data_share_percent": ("wait for data", "% of step time"),
    "first_step_seconds": ("build to first step", "s"),
    "peak_memory_gb": ("peak GPU memory", "GB"),
    "teraflops": ("", "TFLOP/s"),
}


def rows_of(outcomes: Mapping[str, Outcome]) -> dict[str, Row]:
    """A row per subject and figure, figure by figure; the first is named after the subject alone."""
    rows: dict[str, Row] = {}
    for key, (words, unit) in FIGURES.items():
        for name, outcome in outcomes.items():
            is_main = key == ("teraflops" if name == MATMUL else "tokens_per_second")
            has_figure = outcome.reports and all(report.get(key) is not None for report in outcome.reports)
            if not has_figure and not (is_main and outcome.skipped):
                continue
            details = {"choices": outcome.reports[-1]["choices"]} if is_main and _has_choices(outcome) else {}
            row = row_of(outcome, key, name=f"{name}, {words}" if words else name, unit=unit, **details)
            rows[row.name] = row
    return rows


def _has_choices(outcome: Outcome) -> bool:
    return bool(outcome.reports) and "choices" in outcome.reports[-1]


def described(case: Case, data: Data, outcomes: Mapping[str, Outcome], *, repeats: int) -> dict[str, Any]:
    """What was measured, in words."""
    known = next((outcome.reports[0] for outcome in outcomes.values() if outcome.reports), {})
    shape = shape_of(case, data)
    layers = f"{shape['num_layers']} layers of {shape['hidden_size']}"
    heads = f"{shape['num_heads']} heads of {shape['hidden_size'] // shape['num_heads']}"
    return {
        "device": known.get("device", "unknown"),
        "model": f"{case.preset}, {known.get('parameters', 'unknown')} parameters: {layers}, {heads}",
        "vocabulary": f"{data.vocab_size}, padded to {shape['padded_vocab_size']}",
        "batch": f"{case.batch_size} x {case.seq_len} tokens",
        "steps": f"{case.steps}, of which {case.warm_up_steps} aren't timed",
        "repeats": repeats,
        "tokens": "positions computed, rows x row length, for all sides",
    }


def usual_ratios(rows: Mapping[str, Row], outcomes: Mapping[str, Outcome]) -> list[Ratio]:
    """Ours over everybody else. The promises are about a GPU: on a CPU nothing is required."""
    on_gpu = any(report.get("device", "cpu") != "cpu" for outcome in outcomes.values() for report in outcome.reports)
    wanted = [
        ("train to Trainer tuned by hand", OURS, TRAINER_TUNED, 1.45),
        ("train to Trainer's defaults", OURS, TRAINER, 12.0),
        ("train to a plain loop", OURS, PLAIN, 1.0),
        ("document masks on to off", OURS, OURS_UNMASKED, 0.97),
        ("train to the same steps without loading", OURS, SAME_BATCH, None),
        ("model FLOP/s to one large product", f"{OURS}, model FLOP/s", MATMUL, None),
    ]
    return [
        ratio(name, rows[of], rows[over], required=required if on_gpu and required else None)
        for name, of, over, required in wanted
        if of in rows and over in rows
    ]
