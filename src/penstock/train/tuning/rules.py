"""Every choice by rule: pure functions of a machine's profile, a model's sizes and the config.

In: `HardwareProfile`, `ModelFacts`, `TrainConfig`. Out: `Decision`: `Choices`, a reason for each, and the memory that
they are estimated to take. The same input gives the same choices anywhere; no device is touched and no torch imported.
A key of the config that isn't `auto` is taken as it is.

Memory decides three of them at once. The ways to save memory that change no result, cheapest first, are tried with the
largest micro-batch each allows, and the one with the best expected speed is taken:

    expected speed = tokens / (tokens + h)  x  1 plain, 0.97 chunked  x  1 none, 0.87 selective, 0.78 full

h, the tokens at which half the speed is reached, is 2,400 on an H200, where micro-batches of 32 and 64 rows of 1,024
tokens gave 527 and 546 thousand tokens/s. It is taken to grow with a card's peak: a slower card is filled by less.
Smaller optimizer states, which round, come only where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from penstock.train.choices import Choices
from penstock.train.config import TrainConfig
from penstock.train.tuning.break_even import ASSUMED, weighed
from penstock.train.tuning.facts import ModelFacts
from penstock.train.tuning.memory import MemoryEstimate, estimated_memory
from penstock.train.tuning.profiles import ASSUMED_GPU_FLOPS, HardwareProfile

__all__ = ["Decision", "estimated_step_seconds", "memory_of", "row_counts", "rules"]

# Of a GPU's memory; the rest is for fragments and for what the estimate doesn't know.
MEMORY_SHARE = 0.9
HALF_SPEED_TOKENS = 2_400
HALF_SPEED_PEAK = 989e12
KNEE_TOKENS = 65_536  # past it an H200 gained nothing more at 124M, and larger models reach it earlier
# 124M on an H200, k tokens/s: plain 561, chunked 577, Liger 556. Without Triton's kernel chunks gave 510 where plain
# gave 518.
SPEED_OF_LOSS = {"plain": 1.0, "chunked": 1.03, "liger": 0.99, "cce": 0.92}
SPEED_OF_UNFUSED_CHUNKS = 0.98
SPEED_OF_CHECKPOINTING = {"none": 1.0, "selective": 0.87, "full": 0.78}
EXPECTED_MFU = 0.35
LONGEST_DENSE_MASK = 2_048  # tokens a row; a mask of longer ones takes more memory than time is saved
# float32 logits of one micro-batch. On two CPU cores the tiny preset took 0.93, 0.80, 0.70, 0.70 s a step at 128, 64,
# 32 and 16 MiB: past the caches a larger micro-batch only costs.
CPU_LOGITS_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Choices with a reason for each; gains are shares of speed, for what was measured."""

    choices: Choices
    reasons: dict[str, str]
    memory: MemoryEstimate
    gains: Mapping[str, float] = field(default_factory=dict)

    def with_choice(self, name: str, value: object, reason: str, *, gain: float | None = None) -> Decision:
        """The same with one choice made anew."""
        return replace(
            self,
            choices=replace(self.choices, **{name: value}),  # type: ignore[arg-type]
            reasons={**self.reasons, name: reason},
            gains={**self.gains, **({} if gain is None else {name: gain})},
        )


def rules(
    profile: HardwareProfile,
    facts: ModelFacts,
    config: TrainConfig,
    *,
    num_threads: int = 1,
    local_rows: int | None = None,
    attention_kernels: tuple[str, ...] = ("sdpa", "flex"),
    is_sharded: bool = False,
    optimizer_library: str = "torch",
) -> Decision:
    """Decides everything.

    Args:
        profile: the machine.
        facts: the model.
        config: what is set, and what is left to choose.
        num_threads: of torch on the CPU.
        local_rows: rows a step of this process, `batch_rows` if there is but one.
        attention_kernels: those the model can be set to.
        is_sharded: parameters are spread over processes; the head then can't be multiplied by hand.
        optimizer_library: where an 8-bit optimizer would come from; "torch", which has none, if from nowhere.
    """
    local_rows = local_rows or config.batch_rows
    dtype, dtype_reason = _dtype(profile, config)
    attention, attention_reason = _attention(profile, facts, config, attention_kernels)
    draft = Choices(
        device=profile.device,
        dtype=dtype,
        micro_batch_rows=1,
        num_threads=num_threads,
        fused_optimizer=True,
        tf32=config.tf32,
        attention=attention,
        optimizer_library=optimizer_library,
    )
    fitted, fit_reasons = _fitted(draft, profile, facts, config, local_rows=local_rows, is_sharded=is_sharded)
    way, way_reason = _compile(profile, facts, config)
    reasons = {
        "device": "as set" if config.device != "auto" else f"what {profile.name} has",
        "dtype": dtype_reason,
        "num_threads": "torch's own choice for this machine; OMP_NUM_THREADS changes it",
        "fused_optimizer": _fused_reason(fitted),
        "tf32": _tf32_reason(profile, config),
        "attention": attention_reason,
        "optimizer_library": "the 8-bit state is its" if fitted.optimizer == "adamw-8bit" else "torch's own AdamW",
        "compile": way_reason,
        **fit_reasons,
    }
    is_fused = fitted.optimizer == "adamw"
    choices = replace(
        fitted,
        compile=way,
        fused_optimizer=is_fused,
        optimizer_library=optimizer_library if fitted.optimizer == "adamw-8bit" else "torch",
    )
    return Decision(choices=choices, reasons=reasons, memory=memory_of(choices, facts, config, profile))


def memory_of(choices: Choices, facts: ModelFacts, config: TrainConfig, profile: HardwareProfile) -> MemoryEstimate:
    """The estimate for a set of choices on a machine."""
    return estimated_memory(
        facts,
        device=choices.device,
        dtype=choices.dtype,
        rows=choices.micro_batch_rows,
        seq_len=config.seq_len,
        optimizer=choices.optimizer,
        loss_kernel=choices.loss_kernel,
        activation_checkpointing=choices.activation_checkpointing,
        attention=choices.attention,
        document_boundaries=config.document_boundaries,
        gpu_memory_bytes=profile.memory_bytes if profile.device == "cuda" else None,
        has_fused_loss=profile.device == "cuda" and profile.can_compile,
    )


def row_counts(local_rows: int) -> list[int]:
    """Micro-batches that divide the rows of a step, largest first: all are then of one shape."""
    return [rows for rows in range(local_rows, 0, -1) if local_rows % rows == 0]


def estimated_step_seconds(profile: HardwareProfile, facts: ModelFacts, config: TrainConfig, *, rows: int) -> float:
    """Seconds of an eager step of so many rows at a usual share of the card's peak."""
    peak = profile.peak_flops or ASSUMED_GPU_FLOPS
    return facts.flops_per_token * rows * config.seq_len / (EXPECTED_MFU * peak)


def _dtype(profile: HardwareProfile, config: TrainConfig) -> tuple[str, str]:
    if config.dtype != "auto":
        return config.dtype, "as set"
    if profile.device == "cuda" and profile.has_bf16:
        return "bfloat16", "the GPU computes in bfloat16; weights stay float32"
    return "float32", "bfloat16 is taken by rule only on a GPU that computes in it"


def _tf32_reason(profile: HardwareProfile, config: TrainConfig) -> str:
    if profile.device == "cpu":
        return "no effect on a CPU"
    if config.deterministic:
        return "no effect: deterministic runs compute float32 products in full"
    if not profile.has_bf16:
        return "no effect: the card has no TF32, which came with bfloat16"
    return "float32 products in TF32" if config.tf32 else "as set"


def _fused_reason(choices: Choices) -> str:
    if choices.optimizer == "adamw":
        return f"torch has one-kernel AdamW for {choices.device}"
    return f"{choices.optimizer} has an update of its own"


def _attention(
    profile: HardwareProfile, facts: ModelFacts, config: TrainConfig, kernels: tuple[str, ...]
) -> tuple[str, str]:
    if config.attention != "auto":
        return config.attention, "as set"
    if profile.device == "cpu":
        return "sdpa", "on a CPU torch's own choice is the only one"
    if not config.document_boundaries or config.deterministic or not profile.can_compile or "flex" not in kernels:
        return "sdpa", "torch picks the kernel"
    is_short = config.compile == "auto" and _compile(profile, facts, config)[0] == "off"
    if is_short and config.seq_len <= LONGEST_DENSE_MASK:
        return "sdpa", "a dense mask: flex would have to be compiled, and the run is too short for that"
    return "flex", "keeps documents apart by skipping blocks, without a dense mask of rows x T x T"


def _compile(profile: HardwareProfile, facts: ModelFacts, config: TrainConfig) -> tuple[str, str]:
    if config.compile != "auto":
        return config.compile, "as set"
    if config.tune == "off":
        return "off", "tune is off"
    if profile.device == "cpu":
        return "off", "by rule on a CPU"
    if config.deterministic:
        return "off", "deterministic: compiled kernels may differ from one compiler to the next"
    if not profile.can_compile:
        return "off", f"{profile.name} is older than what Triton compiles for"
    if config.steps is None:
        return "off", "weighed when the rows are counted: a run by passes has no steps before"
    seconds = estimated_step_seconds(profile, facts, config, rows=config.batch_rows)
    return weighed(ASSUMED, step_seconds=seconds, steps=config.steps)


def _fitted(
    draft: Choices,
    profile: HardwareProfile,
    facts: ModelFacts,
    config: TrainConfig,
    *,
    local_rows: int,
    is_sharded: bool,
) -> tuple[Choices, dict[str, str]]:
    """Loss kernel, activation checkpointing, micro-batch and optimizer, which share the memory."""
    if profile.device == "cpu" or config.tune == "off":
        return _untuned(draft, profile, facts, config, local_rows=local_rows)
    limit = int(MEMORY_SHARE * profile.memory_bytes)
    best: tuple[float, Choices] | None = None
    for candidate in _candidates(draft, facts, config, is_sharded=is_sharded):
        if best is not None and candidate.optimizer != best[1].optimizer:
            break  # what comes now rounds; nothing that fits is left for it
        counts = _allowed_rows(config, local_rows)
        fitting = (replace(candidate, micro_batch_rows=rows) for rows in counts)
        found = next((each for each in fitting if memory_of(each, facts, config, profile).total <= limit), None)
        if found is not None and (best is None or _speed(found, profile, config) > best[0]):
            best = (_speed(found, profile, config), found)
    chosen = best[1] if best else replace(candidate, micro_batch_rows=_allowed_rows(config, local_rows)[-1])
    need = memory_of(chosen, facts, config, profile).total / 2**30
    have = profile.memory_bytes / 2**30
    fits = f"{need:.1f} of {have:.1f} GiB estimated"
    if best is None:
        fits = f"the least there is, and still {need:.1f} GiB are estimated of {have:.1f}: it may run out of memory"
    return chosen, _fit_reasons(chosen, config, fits)


def _allowed_rows(config: TrainConfig, local_rows: int) -> list[int]:
    if config.micro_batch_rows is not None:
        return [config.micro_batch_rows]
    knee = max(1, KNEE_TOKENS // config.seq_len)
    return [rows for rows in row_counts(local_rows) if rows <= knee] or [1]


def _speed(choices: Choices, profile: HardwareProfile, config: TrainConfig) -> float:
    tokens = choices.micro_batch_rows * config.seq_len
    half_speed_tokens = HALF_SPEED_TOKENS * (profile.peak_flops or ASSUMED_GPU_FLOPS) / HALF_SPEED_PEAK
    share = tokens / (tokens + half_speed_tokens)
    of_loss = SPEED_OF_LOSS[choices.loss_kernel]
    if choices.loss_kernel == "chunked" and not profile.can_compile:
        of_loss = SPEED_OF_UNFUSED_CHUNKS
    return share * of_loss * SPEED_OF_CHECKPOINTING[choices.activation_checkpointing]


def _candidates(draft: Choices, facts: ModelFacts, config: TrainConfig, *, is_sharded: bool) -> Iterator[Choices]:
    """Ways to save memory: those that change no result first."""
    can_chunk = facts.has_head_weight and not is_sharded
    kernels = (
        (config.loss_kernel,) if config.loss_kernel != "auto" else ("plain", "chunked") if can_chunk else ("plain",)
    )
    ways = ("none", "selective", "full")
    checkpointing = ways if config.activation_checkpointing == "auto" else (config.activation_checkpointing,)
    smaller = () if is_sharded else ("adamw-bf16", *(("adamw-8bit",) if draft.optimizer_library != "torch" else ()))
    sizes = ("adamw", *smaller) if config.optimizer == "auto" else (config.optimizer,)
    for optimizer in sizes:
        for way in checkpointing:
            for kernel in kernels:
                yield replace(draft, optimizer=optimizer, activation_checkpointing=way, loss_kernel=kernel)


def _fit_reasons(chosen: Choices, config: TrainConfig, fits: str) -> dict[str, str]:
    def reason(key: str, why: str) -> str:
        return "as set" if getattr(config, key) not in ("auto", None) else why

    rows = f"divides {config.batch_rows} rows a step; {fits}"
    plain = "the logits fit" if chosen.loss_kernel == "plain" else "the logits never exist in whole; the fastest here"
    kept = "the activations fit" if chosen.activation_checkpointing == "none" else "the activations don't fit otherwise"
    full = chosen.optimizer == "adamw"
    return {
        "micro_batch_rows": reason("micro_batch_rows", rows),
        "loss_kernel": reason("loss_kernel", plain),
        "activation_checkpointing": reason("activation_checkpointing", kept),
        "optimizer": reason("optimizer", "float32 states fit" if full else "nothing fits with float32 states"),
    }


def _untuned(
    draft: Choices, profile: HardwareProfile, facts: ModelFacts, config: TrainConfig, *, local_rows: int
) -> tuple[Choices, dict[str, str]]:
    """The simplest of everything, as set where set; the micro-batch by the size of its logits."""
    why = "tune is off" if config.tune == "off" else "by rule on a CPU"

    def taken(key: str, simplest: str) -> tuple[str, str]:
        value = getattr(config, key)
        return (simplest, why) if value == "auto" else (value, "as set")

    found = {
        "loss_kernel": taken("loss_kernel", "plain"),
        "activation_checkpointing": taken("activation_checkpointing", "none"),
        "optimizer": taken("optimizer", "adamw"),
    }
    limit = CPU_LOGITS_BYTES if profile.device == "cpu" else 2**30
    row_bytes = config.seq_len * facts.padded_vocab_size * 4
    rows = next((rows for rows in row_counts(local_rows) if rows * row_bytes <= limit), 1)
    rows_reason = (
        f"the most that divides {local_rows} rows with logits of at most {limit >> 20} MiB on {profile.device}"
    )
    if config.micro_batch_rows is not None:
        rows, rows_reason = config.micro_batch_rows, "as set"
    chosen = replace(draft, micro_batch_rows=rows, **{key: value for key, (value, _) in found.items()})  # type: ignore[arg-type]
    return chosen, {"micro_batch_rows": rows_reason, **{key: reason for key, (_, reason) in found.items()}}
