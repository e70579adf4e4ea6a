"""The flags of a pre-tokenise-then-train script, as a flat YAML or JSON mapping without the dashes.

In: `{config: large, mixed_precision: true, gradient_accumulation: 4, …}`. Out: `Adaptation`. Its presets are sizes with
a row length: `medium` is 0.85 billion parameters at 16,384 tokens, `large` 1.8 billion at 32,768. docs/configuration.md
shows the rules as a table "their flag, ours".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.train.adapters.adaptation import Adaptation
from penstock.train.adapters.common_rules import LENGTH_AND_RATE, MAX_GRAD_NORM, compiled
from penstock.train.adapters.rules import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Rule,
    Ruled,
    Verdict,
    apply_rules,
    nested,
    one_of,
)

__all__ = ["MARKS", "RULES", "adapt_flags", "is_flags"]

MARKS = frozenset(
    {
        "chunk_size", "gradient_accumulation", "mixed_precision", "no_compile", "num_proc", "num_workers",
        "pretokenized", "streaming", "tokenized_dir", "use_8bit_optim",
    }
)  # fmt: skip
"""Flags that no config of ours has: one of them makes a file such a file."""

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"model.preset": "tiny"},
    "small": {"model.preset": "small"},
    "medium": {"model.preset": "large-16k"},
    "large": {"model.preset": "xlarge", "model.rope_theta": 1_000_000.0, "seq_len": 32_768},
}
DEFAULT_BATCH_SIZE = 8

Section = Mapping[str, Any]


def _preset(value: str, section: Section) -> dict[str, Any] | Verdict:
    if value not in PRESETS:
        return Verdict.REFUSED
    given = dict(PRESETS[value])
    if "chunk_size" in section or "max_seq_len" in section:
        given.pop("seq_len", None)
    return given


def _batch(section: Section) -> dict[str, Any]:
    rows = section.get("batch_size", DEFAULT_BATCH_SIZE)
    return {"micro_batch_rows": rows, "batch_rows": rows * section.get("gradient_accumulation", 1)}


RULES = (
    Rule(
        name="config",
        kind=one_of("tiny", "small", "medium", "large", "xlarge"),
        effect="`model.preset`, by size: `medium` (0.85 B, rows of 16,384): `large-16k`; "
        "`large` (1.8 B): `xlarge`, `seq_len` 32,768",
        refusal="no preset is larger than 1.8 billion parameters",
        adapt=_preset,
    ),
    Rule(
        name="dataset", kind=TEXT, idle="the store that `--data` names: `penstock prepare hf:NAME --out STORE` makes it"
    ),
    Rule(
        name="pretokenized",
        kind=FLAG,
        idle="true: training always reads a store",
        refusal="false: text isn't tokenised while training",
        adapt=lambda value, _: Verdict.IDLE if value else Verdict.REFUSED,
    ),
    Rule(name="tokenized_dir", kind=TEXT, idle="`--data` names the store"),
    Rule(name="streaming", kind=FLAG, idle="stores are mapped, never read whole; with a URL, by blocks"),
    Rule(name="chunk_size", kind=COUNT, effect="`seq_len`", sets="seq_len"),
    Rule(name="max_seq_len", kind=COUNT, effect="`seq_len`", sets="seq_len"),
    Rule(name="num_proc", kind=COUNT, idle="`penstock prepare --workers`"),
    Rule(name="num_workers", kind=WHOLE, idle="there are no worker processes: rows are gathered from maps"),
    Rule(
        name="batch_size",
        kind=COUNT,
        effect="`micro_batch_rows`; times accumulation: `batch_rows`",
        adapt=lambda _, section: _batch(section),
    ),
    Rule(
        name="gradient_accumulation",
        kind=COUNT,
        effect=f"`batch_rows` = this × `batch_size` ({DEFAULT_BATCH_SIZE} if there is none)",
        adapt=lambda _, section: _batch(section),
    ),
    *LENGTH_AND_RATE,
    Rule(name="lr", kind=NUMBER, effect="`learning_rate`", sets="learning_rate"),
    Rule(name="warmup_steps", kind=WHOLE, effect="`warmup_steps`", sets="warmup_steps"),
    Rule(name="weight_decay", kind=NUMBER, effect="`weight_decay`", sets="weight_decay"),
    MAX_GRAD_NORM,
    Rule(name="seed", kind=WHOLE, effect="`seed`", sets="seed"),
    Rule(
        name="mixed_precision",
        kind=one_of(True, False, "bf16", "fp16", "no"),
        effect="`dtype`: bfloat16; false, `no`: float32",
        refusal="float16 needs loss scaling; bf16 does without",
        adapt=lambda value, _: (
            Verdict.REFUSED if value == "fp16" else {"dtype": "bfloat16" if value in (True, "bf16") else "float32"}
        ),
    ),
    Rule(
        name="use_8bit_optim",
        kind=FLAG,
        effect="`optimizer`: adamw-8bit; false: adamw",
        adapt=lambda value, _: {"optimizer": "adamw-8bit" if value else "adamw"},
    ),
    compiled("compile"),
    Rule(
        name="no_compile",
        kind=FLAG,
        effect="true: `compile` = off",
        idle="false: `compile` is chosen",
        adapt=lambda value, _: {"compile": "off"} if value else Verdict.IDLE,
    ),
    Rule(name="cudnn_benchmark", kind=FLAG, idle="it chooses kernels of convolutions; there are none"),
    Rule(
        name="gradient_checkpointing",
        kind=FLAG,
        effect="`activation_checkpointing`: full; false: none",
        adapt=lambda value, _: {"activation_checkpointing": "full" if value else "none"},
    ),
    Rule(name="save_steps", kind=COUNT, effect="`checkpoint_every_steps`", sets="checkpoint_every_steps"),
    Rule(name="eval_steps", kind=COUNT, effect="`eval_every_steps`", sets="eval_every_steps"),
    Rule(name="log_steps", kind=COUNT, effect="`log_every_steps`", sets="log_every_steps"),
    Rule(name="tokenizer", kind=TEXT, idle="the store has its own"),
    Rule(name="output_dir", kind=TEXT, idle="`--out` names the run folder"),
    Rule(name="resume", kind=FLAG, effect="as `--resume`", sets="run.resume"),
)


def is_flags(settings: Mapping[str, Any], ours: frozenset[str]) -> bool:
    """Whether a flat mapping has one of `MARKS` and nothing that only a config of ours has."""
    names = {str(name) for name in settings}
    only_ours = ours - {rule.name for rule in RULES}
    return not names.isdisjoint(MARKS) and names.isdisjoint(only_ours)


def adapt_flags(settings: Mapping[str, Any], *, where: str) -> Adaptation:
    """Flags as our settings.

    Raises:
        ConfigError: an unknown flag, or a value of another kind.
    """
    ruled = Ruled()
    apply_rules(
        {str(name).replace("-", "_"): value for name, value in settings.items()}, RULES, ruled, prefix="", where=where
    )
    resume = bool(ruled.settings.pop("run.resume", False))
    return Adaptation(
        kind="flags of a pre-tokenised training script",
        settings=nested(ruled.settings),
        adapted=ruled.settled(),
        resume=resume,
        ours=ruled.ours(),
    )
