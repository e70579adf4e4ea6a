"""`bench train`: the training loop's tokens per second, and how much of a step it waits for data.

The ceiling is the same steps on one batch that never has to be loaded. The model is the built-in `tiny` one, so that a
CPU shows it; on a GPU the same figures say more with `--preset small`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.options import DEFAULT_REPEATS
from penstock.bench.processes import Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Role, ratio
from penstock.bench.stores import store_path
from penstock.bench.training import WARM_UP_STEPS
from penstock.errors import ConfigError
from penstock.sources import STANDARD_LIBRARY

__all__ = ["Options", "run"]

OURS = "penstock train"
CEILING = "the same steps on one batch, nothing loaded"


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
    """

    store: str | None = None
    inputs: tuple[str, ...] = field(default=(STANDARD_LIBRARY,), metadata={"flag": "input"})
    tokenizer: str | None = None
    preset: str = "tiny"
    steps: int = 30
    batch_size: int = 16
    seq_len: int = 256
    repeats: int = DEFAULT_REPEATS


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures both and compares."""
    if options.steps <= WARM_UP_STEPS:
        raise ConfigError(
            f"--steps {options.steps} leaves nothing to time", hint=f"give more than {WARM_UP_STEPS} steps"
        )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        store = store_path(options.store, inputs=options.inputs, tokenizer=options.tokenizer, folder=folder, tell=tell)
        subjects = [
            Subject(name=OURS, role=Role.OURS, task="training:train_steps", settings=_settings(options, store)),
            Subject(
                name=CEILING, role=Role.CEILING, task="training:same_batch_steps", settings=_settings(options, store)
            ),
        ]
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, tell=tell)
    ours = row_of(outcomes[OURS], "tokens_per_second", unit="tokens/s")
    ceiling = row_of(outcomes[CEILING], "tokens_per_second", unit="tokens/s")
    waiting = row_of(outcomes[OURS], "data_share_percent", name="share of a step spent waiting for data", unit="%")
    parameters = outcomes[OURS].reports[0]["parameters"] if outcomes[OURS].reports else "unknown"
    settings = {
        "model": f"{options.preset}, {parameters} parameters",
        "batch": f"{options.batch_size} x {options.seq_len} tokens",
        "steps": f"{options.steps}, of which {WARM_UP_STEPS} aren't timed",
        "repeats": options.repeats,
        "tokens": "targets that count, no padding",
    }
    ratios = [ratio("train to the same steps without loading", ours, ceiling)]
    return BenchResult(benchmark="train", settings=settings, rows=[ours, ceiling, waiting], ratios=ratios)


def _settings(options: Options, store: str) -> dict[str, object]:
    overrides = {
        "model.preset": options.preset,
        "steps": options.steps,
        "batch_rows": options.batch_size,
        "seq_len": options.seq_len,
        "eval_every_steps": "null",
        "eval_rows": 1,
        "checkpoint_every_steps": "null",
        "sample_tokens": 0,
    }
    return {"store": store, "overrides": [f"{key}={value}" for key, value in overrides.items()]}
