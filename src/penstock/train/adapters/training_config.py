"""`training_config.yaml` of a git-history trainer: sections training, epoch_calculation, hardware_monitoring, logging.

In: the mapping, and the machine. Out: `Adaptation`. What isn't given has that trainer's defaults (`DEFAULTS`), so an
empty `training:` means what it meant there. The batch follows from the card's memory and the learning rate from the
batch: 5e-5 at 8 rows is 2.5e-5 at 4. Warm-up with `override_min_warmup` is ceil(ratio × steps), at most
`warmup_steps_max`: 7 of 66 steps; without it `warmup_steps_min` holds too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import ConfigError, nearest_first
from penstock.hardware import Hardware
from penstock.train.adapters.adaptation import Adaptation
from penstock.train.adapters.common_rules import MAX_GRAD_NORM, read_together
from penstock.train.adapters.rules import (
    COUNT,
    FLAG,
    NUMBER,
    SHARE,
    TEXT,
    WHOLE,
    Adapted,
    Rule,
    Ruled,
    apply_rules,
    nested,
)
from penstock.train.tuning.tiers import batch_rows_for_memory, workers_for_cores

__all__ = ["DEFAULTS", "SECTIONS", "adapt_training_config", "is_training_config"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "training": {
        "base_learning_rate": 5e-5,
        "warmup_ratio": 0.1,
        "warmup_steps_min": 10,
        "warmup_steps_max": 1000,
        "weight_decay": 0.01,
        "batch_size_reference": 8,
        "batch_size_large": 8,
        "batch_size_medium": 4,
        "batch_size_small": 2,
        "num_workers": 4,
        "num_workers_min": 1,
        "num_workers_max": 8,
        "pin_memory": True,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "validation_split": 0.1,
        "patience": 3,
        "min_delta": 0.0001,
        "seed": 42,
    },
    "epoch_calculation": {
        "target_tokens": 20_000_000,
        "min_epochs": 3,
        "max_epochs": 10,
        "override_min_warmup": True,
    },
    "hardware_monitoring": {
        "collection_interval_seconds": 5,
        "gpu_memory_threshold_large_gb": 7.0,
        "gpu_memory_threshold_medium_gb": 4.0,
        "gpu_memory_threshold_small_gb": 2.0,
    },
    "logging": {"track_per_step_metrics": False, "include_epoch_summary": True},
}

TIERS = ("large", "medium", "small")
PREPARE_KEYS = frozenset(
    f"training.{name}" for name in ("num_workers", "num_workers_min", "num_workers_max", "validation_split")
)
"""Of `run`, which prepares the data."""

_PREPARED = "`train`: the store is prepared already"
_OTHER_TIER = "the GPU's memory is of another tier"
_THRESHOLD = "of the memory of the first GPU in GB: which of the batch sizes holds"
_BATCH = "`micro_batch_rows` by GPU memory (no GPU: small); times accumulation: `batch_rows`"

SECTIONS: dict[str, tuple[Rule, ...]] = {
    "training": (
        Rule(
            name="base_learning_rate",
            kind=NUMBER,
            effect="`learning_rate` = this × batch / `batch_size_reference`",
            adapt=read_together,
        ),
        Rule(name="batch_size_reference", kind=COUNT, effect="scales `learning_rate`", adapt=read_together),
        Rule(name="batch_size_large", kind=COUNT, effect=_BATCH, idle=_OTHER_TIER, adapt=read_together),
        Rule(name="batch_size_medium", kind=COUNT, effect=_BATCH, idle=_OTHER_TIER, adapt=read_together),
        Rule(name="batch_size_small", kind=COUNT, effect=_BATCH, idle=_OTHER_TIER, adapt=read_together),
        Rule(
            name="gradient_accumulation_steps",
            kind=COUNT,
            effect="`batch_rows` = this × the batch",
            adapt=read_together,
        ),
        Rule(name="warmup_ratio", kind=SHARE, effect="`warmup_ratio`", sets="warmup_ratio"),
        Rule(
            name="warmup_steps_min",
            kind=WHOLE,
            effect="`warmup_steps_min`",
            idle="`override_min_warmup` is true",
            adapt=read_together,
        ),
        Rule(name="warmup_steps_max", kind=WHOLE, effect="`warmup_steps_max`", sets="warmup_steps_max"),
        Rule(name="weight_decay", kind=NUMBER, effect="`weight_decay`", sets="weight_decay"),
        MAX_GRAD_NORM,
        Rule(
            name="num_workers",
            kind=WHOLE,
            effect="`run`: worker processes of `prepare`, at most",
            idle=_PREPARED,
            adapt=read_together,
        ),
        Rule(name="num_workers_min", kind=WHOLE, effect="of them, at least", idle=_PREPARED, adapt=read_together),
        Rule(name="num_workers_max", kind=WHOLE, effect="of them, at most", idle=_PREPARED, adapt=read_together),
        Rule(name="pin_memory", kind=FLAG, idle="buffers are pinned wherever there is a GPU"),
        Rule(
            name="validation_split",
            kind=SHARE,
            effect="`run`: the share of split `val`",
            idle=_PREPARED,
            adapt=read_together,
        ),
        Rule(name="patience", kind=COUNT, effect="`patience`", sets="patience"),
        Rule(name="min_delta", kind=NUMBER, effect="`min_delta`", sets="min_delta"),
        Rule(name="seed", kind=WHOLE, effect="`seed`", sets="seed"),
    ),
    "epoch_calculation": (
        Rule(
            name="target_tokens",
            kind=COUNT,
            effect="`target_tokens`: the fewest whole passes that give so many tokens, within min and max",
            sets="target_tokens",
        ),
        Rule(name="min_epochs", kind=COUNT, effect="`min_epochs`", sets="min_epochs"),
        Rule(name="max_epochs", kind=COUNT, effect="`max_epochs`", sets="max_epochs"),
        Rule(
            name="override_min_warmup",
            kind=FLAG,
            effect="true: the ratio decides, whatever `warmup_steps_min`",
            adapt=read_together,
        ),
    ),
    "hardware_monitoring": (
        Rule(
            name="collection_interval_seconds",
            kind=NUMBER,
            effect="`hardware_interval_seconds`",
            sets="hardware_interval_seconds",
        ),
        Rule(
            name="gpu_memory_threshold_large_gb",
            kind=NUMBER,
            effect=_THRESHOLD,
            idle="there is no GPU, or a larger threshold is reached",
            adapt=read_together,
        ),
        Rule(
            name="gpu_memory_threshold_medium_gb",
            kind=NUMBER,
            effect=_THRESHOLD,
            idle="there is no GPU, or a larger threshold is reached",
            adapt=read_together,
        ),
        Rule(
            name="gpu_memory_threshold_small_gb",
            kind=NUMBER,
            effect=_THRESHOLD,
            idle="there is no GPU, or a larger threshold is reached",
            adapt=read_together,
        ),
    ),
    "logging": (
        Rule(
            name="track_per_step_metrics",
            kind=FLAG,
            idle="every step is recorded, whatever this says (`log_every_steps`)",
        ),
        Rule(name="include_epoch_summary", kind=FLAG, idle="there is always one"),
        Rule(name="log_interval", kind=COUNT, effect="`log_every_steps`", sets="log_every_steps"),
        Rule(name="save_interval", kind=COUNT, effect="`checkpoint_every_steps`", sets="checkpoint_every_steps"),
        Rule(name="level", kind=TEXT, idle="what is printed is up to `--verbose`"),
        Rule(name="log_level", kind=TEXT, idle="what is printed is up to `--verbose`"),
    ),
}


def is_training_config(settings: Mapping[str, Any]) -> bool:
    """Whether a mapping has one of the sections, none of which a config of ours has."""
    return any(isinstance(settings.get(name), dict) for name in SECTIONS)


def adapt_training_config(settings: Mapping[str, Any], *, where: str, hardware: Hardware) -> Adaptation:
    """The sections as our settings, sized to the machine.

    Raises:
        ConfigError: an unknown section or key, or a value of another kind.
    """
    for name, section in settings.items():
        if name not in SECTIONS:
            raise ConfigError(
                f"unknown section {name!r} in {where}", hint=f"known sections: {nearest_first(str(name), SECTIONS)}"
            )
        if not isinstance(section, dict | None):
            raise ConfigError(
                f"section {name!r} is {section!r:.80} in {where}, expected a mapping", hint="write `key: value` lines"
            )
    ruled = Ruled()
    values: dict[str, Any] = {}
    for name, section_rules in SECTIONS.items():
        given = settings.get(name) or {}
        apply_rules({**DEFAULTS[name], **given}, section_rules, ruled, prefix=f"{name}.", where=where)
        values |= {**DEFAULTS[name], **{key: value for key, value in given.items() if value is not None}}
    values = {key: _read(key, value) for key, value in values.items()}
    memory = hardware.gpus[0].memory_bytes / 1e9 if hardware.gpus else None
    derived = _derived(values, memory)
    ruled.settings |= derived
    idle = _idle_keys(values, memory)
    return Adaptation(
        kind="training_config.yaml",
        settings=nested(ruled.settings),
        adapted=tuple(_with_results(one, derived, idle) for one in ruled.settled()),
        split=f"train={1 - values['validation_split']:.6g},val={values['validation_split']:.6g}",
        workers=workers_for_cores(
            hardware.cpu_cores,
            lowest=max(values["num_workers_min"], 1),
            highest=max(min(values["num_workers"], values["num_workers_max"]), 1),
        ),
        ours={**ruled.ours(), **_RESULTS},
        prepare_keys=PREPARE_KEYS,
    )


def _read(key: str, value: Any) -> Any:
    rule = next(rule for section in SECTIONS.values() for rule in section if rule.name == key)
    return rule.kind.read(value)


def _derived(values: Mapping[str, Any], memory: float | None) -> dict[str, Any]:
    """What follows from several keys and the GPU's memory in GB, None where there is no GPU."""
    batch = batch_rows_for_memory(
        memory,
        **{tier: values[f"batch_size_{tier}"] for tier in TIERS},
        **{f"{tier}_gigabytes": values[f"gpu_memory_threshold_{tier}_gb"] for tier in TIERS},
    )
    return {
        "micro_batch_rows": batch,
        "batch_rows": batch * values["gradient_accumulation_steps"],
        "learning_rate": values["base_learning_rate"] * batch / values["batch_size_reference"],
        "warmup_steps_min": None if values["override_min_warmup"] else values["warmup_steps_min"],
        "schedule": "linear",
        "min_learning_rate_ratio": 0.0,
    }


def _idle_keys(values: Mapping[str, Any], memory: float | None) -> dict[str, str]:
    """Keys that change nothing on this machine, and why: tiers of other cards, and thresholds not looked at."""
    thresholds = {tier: values[f"gpu_memory_threshold_{tier}_gb"] for tier in TIERS}
    reached = [tier for tier in TIERS if memory is None or memory >= thresholds[tier]]
    tier = "small" if memory is None else reached[0] if reached else None
    machine = "there is no GPU" if memory is None else f"the GPU has {memory:.1f} GB"
    holds = f"the tier is {tier}" if tier else "that is less than the smallest tier, one row at a time"
    idle = {f"training.batch_size_{each}": f"{machine}: {holds}" for each in TIERS if each != tier}
    # From the largest down, until one is reached.
    looked_at = () if memory is None else TIERS[: TIERS.index(tier) + 1] if tier else TIERS
    idle |= {
        f"hardware_monitoring.gpu_memory_threshold_{each}_gb": f"{machine}: {holds}"
        for each in TIERS
        if each not in looked_at
    }
    if values["override_min_warmup"]:
        idle["training.warmup_steps_min"] = "override_min_warmup is true"
    return idle


_RESULTS = {
    "training.base_learning_rate": ("learning_rate",),
    "training.batch_size_reference": ("learning_rate",),
    "training.batch_size_large": ("micro_batch_rows",),
    "training.batch_size_medium": ("micro_batch_rows",),
    "training.batch_size_small": ("micro_batch_rows",),
    "training.gradient_accumulation_steps": ("batch_rows",),
    "training.warmup_steps_min": ("warmup_steps_min",),
    "epoch_calculation.override_min_warmup": ("warmup_steps_min",),
    "hardware_monitoring.gpu_memory_threshold_large_gb": ("micro_batch_rows",),
    "hardware_monitoring.gpu_memory_threshold_medium_gb": ("micro_batch_rows",),
    "hardware_monitoring.gpu_memory_threshold_small_gb": ("micro_batch_rows",),
}


def _with_results(one: Adapted, derived: Mapping[str, Any], idle: Mapping[str, str]) -> Adapted:
    """The same key with what came of it together with others."""
    if one.key in idle:
        return replace(one, outcome="not applicable", detail=idle[one.key])
    names = _RESULTS.get(one.key, ())
    return replace(one, detail=", ".join(f"{name}={derived[name]}" for name in names) or one.detail)
