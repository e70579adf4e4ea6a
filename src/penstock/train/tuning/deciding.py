"""From config, model and this machine to a decision: rules, then what measurements correct.

In: a config and the model. Out: `Decision`. `tune` says how: `auto` measures on a GPU unless the run is deterministic,
too short to pay for it, or spread over processes; `rules` never measures; `measure` always; `off` takes the simplest of
everything. What was measured on this machine for this model is taken from the cache.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch

from penstock import __version__
from penstock.errors import ConfigError
from penstock.runlog import RunLog
from penstock.train.attention import check_kernel, usable_kernels
from penstock.train.choices import Choices, chosen_device, numeric_settings
from penstock.train.config import TrainConfig
from penstock.train.language_model import LanguageModel
from penstock.train.loss import refuse_impossible_kernel
from penstock.train.optimizer import library_of
from penstock.train.tuning.break_even import Compiling, weighed
from penstock.train.tuning.cache import cached, keep
from penstock.train.tuning.facts import ModelFacts, facts_of_model
from penstock.train.tuning.measuring import Measured, Search
from penstock.train.tuning.memory import DENSE_MASK_KERNELS
from penstock.train.tuning.profiles import HardwareProfile, this_machine
from penstock.train.tuning.rules import Decision, estimated_step_seconds, memory_of, rules
from penstock.train.tuning.trials import Trial, Trials

__all__ = ["decided", "with_measurements"]

# Measuring may take this share of what a run is estimated to take, and isn't begun for less than some seconds.
SHARE_OF_RUN = 0.1
LEAST_SECONDS = 5.0
# What measurements may change, where the config leaves it open.
_OPEN_KEYS = ("attention", "micro_batch_rows", "loss_kernel", "compile")


def decided(
    config: TrainConfig, model: LanguageModel, log: RunLog, *, world_size: int = 1, is_sharded: bool = False
) -> Decision:
    """Everything decided; the model is moved to the device if it has to be measured."""
    device, device_reason = chosen_device(config)
    profile = this_machine(device)
    facts = facts_of_model(model, seq_len=config.seq_len)
    local_rows = max(1, config.batch_rows // world_size)
    start = rules(
        profile,
        facts,
        config,
        num_threads=torch.get_num_threads(),
        local_rows=local_rows,
        attention_kernels=model.attention_kernels,
        is_sharded=is_sharded,
        optimizer_library=_optimizer_library(config, device),
    )
    start = start.with_choice("device", device, device_reason)
    _refuse_impossible(start.choices, config, facts, model, is_sharded=is_sharded)
    seconds, why_not = _seconds_to_measure(config, profile, facts, world_size=world_size)
    if why_not:
        log.append("event", message=f"chosen by rule: {why_not}")
        return start
    return _measured_decision(config, model, log, profile, facts, start, seconds=seconds, local_rows=local_rows)


def _optimizer_library(config: TrainConfig, device: str) -> str:
    """Where an 8-bit optimizer would come from; it must be there only if it was asked for."""
    if config.optimizer == "adamw-8bit":
        return library_of("adamw-8bit", device)
    try:
        return library_of("adamw-8bit", device) if config.optimizer == "auto" and device == "cuda" else "torch"
    except ConfigError:
        return "torch"


def _refuse_impossible(
    choices: Choices, config: TrainConfig, facts: ModelFacts, model: LanguageModel, *, is_sharded: bool
) -> None:
    """Raises `ConfigError` for what was set and can't work here."""
    refuse_impossible_kernel(
        choices.loss_kernel, device=choices.device, has_head_weight=facts.has_head_weight and not is_sharded
    )
    if is_sharded and choices.optimizer != "adamw":
        raise ConfigError(
            f"optimizer is {choices.optimizer!r}, but parameters are spread over processes: expected 'adamw'",
            hint="set optimizer=adamw, or parallel=ddp",
        )
    if config.attention == "auto":
        return
    if config.attention not in model.attention_kernels:
        raise ConfigError(
            f"attention is {config.attention!r}, expected one of this model's: {', '.join(model.attention_kernels)}",
            hint="set attention to one of those, or leave it out",
        )
    check_kernel(
        config.attention,
        torch.device(choices.device),
        dtype=getattr(torch, choices.dtype),
        document_boundaries=config.document_boundaries,
    )


def _seconds_to_measure(
    config: TrainConfig, profile: HardwareProfile, facts: ModelFacts, *, world_size: int
) -> tuple[float, str]:
    """How long measuring may take, or why it isn't done."""
    if config.tune == "measure":
        if config.deterministic:
            raise ConfigError(
                "tune is 'measure', but the run is deterministic: what is measured differs from run to run",
                hint="leave tune out, or the run's deterministic",
            )
        return config.tune_seconds, ""
    if config.tune in ("rules", "off"):
        return 0.0, f"tune is {config.tune}"
    if profile.device == "cpu":
        return 0.0, "on a CPU nothing is measured"
    if config.deterministic:
        return 0.0, "deterministic runs measure nothing"
    if world_size > 1:
        return 0.0, f"all {world_size} processes must choose alike"
    run_seconds = estimated_step_seconds(profile, facts, config, rows=config.batch_rows) * config.num_steps
    seconds = min(config.tune_seconds, SHARE_OF_RUN * run_seconds)
    if seconds < LEAST_SECONDS:
        return 0.0, f"the run is estimated at {run_seconds:.0f} s, too short to pay for measuring"
    return seconds, ""


def _measured_decision(
    config: TrainConfig,
    model: LanguageModel,
    log: RunLog,
    profile: HardwareProfile,
    facts: ModelFacts,
    start: Decision,
    *,
    seconds: float,
    local_rows: int,
) -> Decision:
    """The rules' decision corrected by measurements, from the cache or made now."""
    key = _cache_key(config, profile, facts, start.choices, local_rows=local_rows)
    known = cached(key, log) if config.tune_cache else None
    trials = Trials(model, config)
    search = Search(
        try_out=trials,
        clock=time.perf_counter,
        seconds=seconds,
        may_change=_open_keys(config, facts, profile),
        attention_kernels=_kernels_to_try(config, model, start.choices),
        local_rows=local_rows,
        memory_bytes=profile.memory_bytes,
        optimizer_bytes=start.memory.optimizer,
    )
    with trials.prepared(start.choices.device), numeric_settings(start.choices, deterministic=config.deterministic):
        found = known or search.measured(start.choices)
        if found is None:
            failure = search.trials[-1].failure if search.trials else "no time"
            log.append("event", message=f"chosen by rule: measuring failed: {failure}")
            return start
        merged = with_measurements(start, found, config, is_from_cache=known is not None)
        step_seconds = config.batch_rows * config.seq_len / found.tokens_per_second
        full = search.with_compiling(found, merged.choices, step_seconds=step_seconds, steps=config.num_steps)
    for trial in search.trials:
        _record(trial, log)
    if config.tune_cache and full != known:
        keep(key, full, log)
    decision = with_measurements(start, full, config, is_from_cache=known is not None)
    return replace(decision, memory=memory_of(decision.choices, facts, config, profile))


def _open_keys(config: TrainConfig, facts: ModelFacts, profile: HardwareProfile) -> frozenset[str]:
    is_open = {key for key in _OPEN_KEYS if getattr(config, key) in ("auto", None)}
    if not facts.has_head_weight:
        is_open.discard("loss_kernel")
    if not profile.can_compile:
        is_open.discard("compile")
    return frozenset(is_open)


def _kernels_to_try(config: TrainConfig, model: LanguageModel, choices: Choices) -> tuple[str, ...]:
    usable = usable_kernels(
        torch.device(choices.device),
        dtype=getattr(torch, choices.dtype),
        document_boundaries=config.document_boundaries,
    )
    known = [kernel for kernel in usable if kernel in model.attention_kernels]
    if config.document_boundaries and choices.attention not in DENSE_MASK_KERNELS:
        # A dense mask takes rows x T x T bytes, and was never the fastest where there is another way.
        known = [kernel for kernel in known if kernel not in DENSE_MASK_KERNELS]
    return tuple(known)


def with_measurements(start: Decision, found: Measured, config: TrainConfig, *, is_from_cache: bool) -> Decision:
    """The rules' decision with what was measured put in; compiling weighed for this run's steps."""
    source = " (measured earlier on this machine)" if is_from_cache else " (measured)"
    decision = start
    for name in ("attention", "micro_batch_rows", "loss_kernel"):
        if name in found.notes:
            value, gain = getattr(found, name), found.gains.get(name)
            decision = decision.with_choice(name, value, found.notes[name] + source, gain=gain)
    if "compile" not in found.notes:
        return decision
    if found.compile_seconds is None or found.compile_saved_share < 0:
        reason = f"{found.notes['compile']}{source}" if found.compile_seconds is not None else found.notes["compile"]
        return decision.with_choice("compile", "off", reason)
    blocks = Compiling(
        way="blocks", cost_seconds=found.compile_seconds, saved_share=found.compile_saved_share, is_measured=True
    )
    step_seconds = config.batch_rows * config.seq_len / found.tokens_per_second
    way, reason = weighed(blocks, step_seconds=step_seconds, steps=config.num_steps)
    gain = 1 / (1 - blocks.saved_share) - 1 if way == "blocks" else None
    return decision.with_choice("compile", way, reason, gain=gain)


def _cache_key(
    config: TrainConfig, profile: HardwareProfile, facts: ModelFacts, start: Choices, *, local_rows: int
) -> dict[str, Any]:
    """All that a measurement depends on; the number of steps isn't part of it."""
    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "driver": torch.version.cuda or "none",
        "profile": asdict(profile),
        "facts": asdict(facts),
        "start": asdict(start) | {"compile": "auto"},
        "seq_len": config.seq_len,
        "rows": local_rows,
        "document_boundaries": config.document_boundaries,
        "open": sorted(_open_keys(config, facts, profile)),
    }


def _record(trial: Trial, log: RunLog) -> None:
    choices = trial.choices
    log.append(
        "trial",
        attention=choices.attention,
        micro_batch_rows=choices.micro_batch_rows,
        loss_kernel=choices.loss_kernel,
        compile=choices.compile,
        tokens_per_second=round(trial.tokens_per_second, 1),
        first_seconds=round(trial.first_seconds, 4),
        peak_bytes=trial.peak_bytes,
        failure=trial.failure,
    )
