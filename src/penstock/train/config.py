"""The settings of a training run.

In: a YAML or JSON file, or nothing, and `key=value` overrides as the command line's `--set` takes them. Out: a frozen
`TrainConfig` in which everything is either a value or `None`, meaning "chosen by rule"; the rules' results are recorded
by the loop with their reasons. An unknown key is refused by name, the nearest known ones first. Needs no torch.

A run is bound to its config: a checkpoint continues only under the same `bound_settings`. `FREE_KEYS` are the settings
that change what is watched and kept, never what is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from penstock.errors import ConfigError, nearest_first
from penstock.hashing import digest_of
from penstock.train.shape import PRESETS, ModelShape, padded_vocab_size

__all__ = ["FREE_KEYS", "ModelConfig", "TrainConfig", "load_config"]

DEFAULT_WARMUP_RATIO = 0.1

FREE_KEYS = frozenset(
    {
        "checkpoint_every_steps",
        "eval_every_steps",
        "eval_rows",
        "keep_checkpoints",
        "log_every_steps",
        # Weights may change: the loader appends a stage, and refuses other sources itself.
        "mix",
        "mix_epochs",
        "mix_temperature",
        "prefetch_batches",
        "sample_tokens",
        "stop_after_steps",
        # A resumed run takes over what was chosen; how it would be chosen anew is of no matter.
        "tune",
        "tune_cache",
        "tune_seconds",
    }
)


def _off_as_written(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Settings):
    """The built-in decoder: a preset, and what differs from it (`None` keeps the preset's value)."""

    preset: Literal["tiny", "small", "medium", "large", "xlarge"] = "tiny"
    num_layers: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=2)
    feed_forward_size: int | None = Field(default=None, ge=1)
    max_positions: int | None = Field(default=None, ge=1, description="None: the run's seq_len")
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = True

    def shape(self, *, vocab_size: int, seq_len: int) -> ModelShape:
        """Every size decided; the vocabulary is padded to a multiple of 64."""
        preset = PRESETS[self.preset]
        num_heads = self.num_heads or preset.num_heads
        # A changed head count without a word about key/value heads: each head gets its own.
        num_kv_heads = self.num_kv_heads or (num_heads if self.num_heads else preset.num_kv_heads)
        max_positions = self.max_positions or seq_len
        if max_positions < seq_len:
            raise ConfigError(
                f"model.max_positions is {max_positions}, expected at least seq_len ({seq_len})",
                hint=f"set model.max_positions={seq_len}, or leave it out",
            )
        return ModelShape(
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size(vocab_size),
            num_layers=self.num_layers or preset.num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            hidden_size=self.hidden_size or preset.hidden_size,
            feed_forward_size=self.feed_forward_size or preset.feed_forward_size,
            max_positions=max_positions,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
        )


class TrainConfig(_Settings):
    """One run. The defaults are the demo: they fit two CPU cores and a minute or two."""

    model: ModelConfig = ModelConfig()
    seq_len: int = Field(default=256, ge=1)
    batch_rows: int = Field(default=8, ge=1, description="rows per step, over all devices and micro-batches")
    micro_batch_rows: int | None = Field(default=None, ge=1, description="None: by rule")
    document_boundaries: bool = True
    pack: Literal["concat", "best-fit", "windows", "pad"] = "concat"
    overlap: int = Field(default=0, ge=0, description="of windows: tokens that a row repeats from the one before")
    overlap_loss: bool = Field(default=False, description="of windows: whether repeated tokens count again")
    mix: tuple[str, ...] = Field(default=(), description="NAME=WEIGHT of stores and path patterns; docs/mixture.md")
    mix_temperature: float = Field(default=1.0, gt=0, description="above 1: sources grow more alike")
    mix_epochs: tuple[str, ...] = Field(default=(), description="NAME=PASSES after which a source leaves")
    steps: int = Field(default=200, ge=1)
    learning_rate: float | None = Field(default=None, gt=0, description="the peak; None: the preset's")
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1, description="of `steps`; 0.1 when neither is given")
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="None: no clipping")
    seed: int = Field(default=42, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deterministic: bool = False
    tf32: bool = Field(default=True, description="float32 products of a GPU in TF32; never with deterministic")
    loss_kernel: Literal["auto", "plain", "chunked", "liger", "cce"] = "auto"
    optimizer: Literal["auto", "adamw", "adamw-8bit", "adamw-bf16"] = "auto"
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    compile: Annotated[Literal["auto", "off", "blocks", "whole"], BeforeValidator(_off_as_written)] = "auto"
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "flex", "varlen"] = "auto"
    tune: Annotated[Literal["auto", "rules", "off", "measure"], BeforeValidator(_off_as_written)] = "auto"
    tune_cache: bool = Field(default=True, description="keep measurements in the user's cache folder")
    tune_seconds: float = Field(default=90.0, gt=0, description="the most that measuring may take")
    eval_every_steps: int | None = Field(default=50, ge=1, description="None: at the end only")
    eval_rows: int | None = Field(default=64, ge=1, description="held-out rows per evaluation; None: all")
    checkpoint_every_steps: int | None = Field(default=50, ge=1, description="None: at the end only")
    keep_checkpoints: int = Field(default=2, ge=1)
    log_every_steps: int = Field(default=1, ge=1)
    prefetch_batches: int = Field(default=2, ge=0)
    sample_tokens: int = Field(default=48, ge=0, description="0: no samples")
    stop_after_steps: int | None = Field(
        default=None, ge=1, description="of this start of the run; then saves and stops, as on SIGTERM"
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TrainConfig:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio is {self.warmup_ratio}, expected one of them",
                hint="leave one out, or set it to null",
            )
        if self.micro_batch_rows is not None and self.micro_batch_rows > self.batch_rows:
            raise ConfigError(
                f"micro_batch_rows is {self.micro_batch_rows}, expected at most batch_rows ({self.batch_rows})",
                hint="leave micro_batch_rows out to have it chosen",
            )
        if self.pack != "windows" and (self.overlap or self.overlap_loss):
            name, value = ("overlap", self.overlap) if self.overlap else ("overlap_loss", self.overlap_loss)
            raise ConfigError(
                f"{name} is {value}, which does nothing with pack {self.pack!r}",
                hint=f"leave {name} out, or set pack=windows",
            )
        if not self.overlap < self.seq_len:
            raise ConfigError(
                f"overlap is {self.overlap}, expected less than seq_len ({self.seq_len})",
                hint=f"set overlap to {self.seq_len - 1} or less",
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas is {list(self.betas)}, expected two numbers of at least 0 and below 1",
                hint="the usual values are [0.9, 0.95]",
            )
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up."""
        return self.learning_rate if self.learning_rate is not None else PRESETS[self.model.preset].learning_rate

    @property
    def num_warmup_steps(self) -> int:
        """Steps of warm-up: as given, else ceil(ratio * steps); never more than the run has."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, self.steps)
        ratio = DEFAULT_WARMUP_RATIO if self.warmup_ratio is None else self.warmup_ratio
        # Exact, because 70 * 0.1 is 7.000000000000001 in floats, whose ceiling is 8.
        return min(math.ceil(Fraction(str(ratio)) * self.steps), self.steps)

    def bound_settings(self) -> dict[str, Any]:
        """What a checkpoint must agree with, as JSON values by dotted key."""
        settings = self.model_dump(mode="json", exclude=set(FREE_KEYS))
        model = settings.pop("model")
        return {**settings, **{f"model.{key}": value for key, value in model.items()}}

    def digest(self) -> str:
        """Names the bound settings."""
        return digest_of(self.bound_settings())


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a file, `overrides` such as `model.num_layers=6` laid over it; values are YAML scalars."""
    settings = {} if path is None else _read_settings(path)
    for override in overrides:
        _lay_over(settings, override)
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise _as_config_error(error, where=f" in {path}" if path else "") from error


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"the config {path} can't be read: {error.strerror}",
            hint="check the path, or leave it out",
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config {path} can't be parsed: {reason}", hint="mend the line named") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"the config {path} holds a {type(settings).__name__}, expected a mapping of settings",
            hint="write one `key: value` a line",
        )
    return settings


def _lay_over(settings: dict[str, Any], override: str) -> None:
    """Puts one `a.b=value` into the nested settings."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"the setting {override!r} has no value, expected key=value", hint="for example steps=200")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {override!r} can't be parsed", hint="for example betas=[0.9,0.95]") from error
    *parents, last = key.strip().split(".")
    level = settings
    for parent in parents:
        below = level.get(parent)
        # What isn't a mapping is replaced, so that validation names the unknown or misplaced key.
        level[parent] = dict(below) if isinstance(below, dict) else {}
        level = level[parent]
    level[last] = value


def _as_config_error(error: ValidationError, *, where: str) -> ConfigError:
    """The first problem in our words; unknown keys come first, as they explain the others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        in_model = first["loc"][0] == "model" and len(first["loc"]) > 1
        known = [f"model.{name}" for name in ModelConfig.model_fields] if in_model else list(TrainConfig.model_fields)
        return ConfigError(f"unknown setting {key!r}{where}", hint=f"known settings: {nearest_first(key, known)}")
    more = f" ({len(problems) - 1} more settings are wrong too)" if len(problems) > 1 else ""
    message = f"{key} is {first['input']!r}{where}: {first['msg']}{more}"
    return ConfigError(message, hint=f"set {key} to such a value, or leave it out for the default")
