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
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from penstock.errors import ConfigError, nearest_first
from penstock.hashing import digest_of
from penstock.load.stream import StreamSettings
from penstock.train.model_config import AdapterConfig, ModelConfig, Settings
from penstock.train.schedule import Schedule
from penstock.train.shape import PRESETS

if TYPE_CHECKING:
    from penstock.train.adapters import Adaptation

__all__ = ["FREE_KEYS", "AdapterConfig", "ModelConfig", "TrainConfig", "load_adapted", "load_config"]

DEFAULT_STEPS = 200
DEFAULT_WARMUP_RATIO = 0.1
DEFAULT_DECAY_RATIO = 0.2
# What gives a run its length; one of them is given.
LENGTH_KEYS = ("steps", "epochs", "target_tokens")
# What leaves a file's settings where the command line sets another.
RIVALS = {
    "steps": ("epochs", "target_tokens", "min_epochs", "max_epochs"),
    "epochs": ("steps", "target_tokens", "min_epochs", "max_epochs"),
    "target_tokens": ("steps", "epochs"),
    "warmup_steps": ("warmup_ratio", "warmup_steps_min", "warmup_steps_max"),
    "warmup_ratio": ("warmup_steps",),
}
# Keys that shape one schedule and do nothing under the others.
SCHEDULE_OF_KEY = {"schedule_power": "polynomial", "schedule_cycles": "cosine-restarts", "decay_ratio": "wsd"}

CONFIG_NAME = "config.json"
MIX_KEYS = ("mix", "mix_epochs", "mix_temperature")
FREE_KEYS = frozenset(
    {
        "async_checkpoints",
        "checkpoint_every_steps",
        "eval_every_steps",
        "eval_rows",
        "hardware_interval_seconds",
        "keep_best",
        "keep_checkpoints",
        "log_every_steps",
        # Weights may change: the loader appends a stage, and refuses other sources itself.
        *MIX_KEYS,
        "network",
        # A run may go on in another number of processes: the batches and their order are the same.
        "parallel",
        "prefetch_batches",
        "sample_tokens",
        "stop_after_steps",
        # A resumed run takes over what was chosen; how it would be chosen anew is of no matter.
        "tune",
        "tune_cache",
        "tune_seconds",
        "trackers",
    }
)


def _off_as_written(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class TrainConfig(Settings):
    """One run. The defaults are the demo: they fit two CPU cores and a minute or two."""

    model: ModelConfig = ModelConfig()
    seq_len: int = Field(default=256, ge=1)
    batch_rows: int = Field(default=8, ge=1, description="rows per step, over all devices and micro-batches")
    micro_batch_rows: int | None = Field(default=None, ge=1, description="None: by rule")
    document_boundaries: bool = True
    pack: Literal["concat", "best-fit", "windows", "pad"] = "concat"
    overlap: int = Field(default=0, ge=0, description="of windows: tokens that a row repeats from the one before")
    overlap_loss: bool = Field(default=False, description="of windows: whether repeated tokens count again")
    order: Literal["shuffled", "sequential", "group-by-length", "curriculum", "segments"] = "shuffled"
    curriculum_by: str | None = Field(default=None, min_length=1, description="None: document-length; or a fact's name")
    window_segments: int | None = Field(default=None, ge=1, description="of the order segments; None: 8")
    fim_rate: float = Field(default=0.0, ge=0, le=1, description="share of documents made fill-in-the-middle")
    fim_spm_rate: float | None = Field(default=None, ge=0, le=1, description="of those, suffix first; None: 0.5")
    fim_tokens: tuple[str, str, str] | None = Field(default=None, description="prefix, suffix, middle; None: as usual")
    random_crop: float = Field(default=0.0, ge=0, le=1, description="share of rows cut down to a stretch of themselves")
    random_crop_smallest: float | None = Field(default=None, ge=0, le=1, description="share of a row; None: 0.5")
    mix: tuple[str, ...] = Field(default=(), description="NAME=WEIGHT of stores and path patterns; docs/mixture.md")
    mix_temperature: float = Field(default=1.0, gt=0, description="above 1: sources grow more alike")
    mix_epochs: tuple[str, ...] = Field(default=(), description="NAME=PASSES after which a source leaves")
    steps: int | None = Field(default=None, ge=1, description="200 where neither of the next two is given")
    epochs: float | None = Field(default=None, gt=0, description="passes over the rows, in place of steps")
    target_tokens: int | None = Field(default=None, ge=1, description="as many whole passes as give so many tokens")
    min_epochs: int | None = Field(default=None, ge=1, description="of target_tokens: the fewest passes")
    max_epochs: int | None = Field(default=None, ge=1, description="of target_tokens: the most passes")
    learning_rate: float | None = Field(default=None, gt=0, description="the peak; None: the preset's")
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1, description="of `steps`; 0.1 when neither is given")
    warmup_steps_min: int | None = Field(default=None, ge=0, description="of warmup_ratio: the fewest")
    warmup_steps_max: int | None = Field(default=None, ge=0, description="of warmup_ratio: the most")
    schedule: Schedule = "cosine"
    schedule_power: float | None = Field(default=None, gt=0, description="of polynomial; None: 1")
    schedule_cycles: int | None = Field(default=None, ge=1, description="of cosine-restarts; None: 1")
    decay_ratio: float | None = Field(default=None, gt=0, le=1, description="of wsd: the last share; None: 0.2")
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="None: no clipping")
    seed: int = Field(default=42, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deterministic: bool = False
    network: bool = Field(default=False, description="whether model.pretrained may be downloaded from the hub")
    tf32: bool = Field(default=True, description="float32 products of a GPU in TF32; never with deterministic")
    loss_kernel: Literal["auto", "plain", "chunked", "liger", "cce"] = "auto"
    optimizer: Literal["auto", "adamw", "adamw-8bit", "adamw-bf16"] = "auto"
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    compile: Annotated[Literal["auto", "off", "blocks", "whole"], BeforeValidator(_off_as_written)] = "auto"
    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "flex", "varlen", "cudnn-varlen"] = "auto"
    tune: Annotated[Literal["auto", "rules", "off", "measure"], BeforeValidator(_off_as_written)] = "auto"
    tune_cache: bool = Field(default=True, description="keep measurements in the user's cache folder")
    tune_seconds: float = Field(default=90.0, gt=0, description="the most that measuring may take")
    eval_every_steps: int | None = Field(default=50, ge=1, description="None: at the end only")
    eval_rows: int | None = Field(default=64, ge=1, description="held-out rows per evaluation; None: all")
    patience: int | None = Field(default=None, ge=1, description="evaluations without gain that end the run")
    min_delta: float | None = Field(default=None, ge=0, description="held-out loss that counts as a gain; None: 0")
    keep_best: bool | None = Field(default=None, description="keep the best checkpoint; None: with patience")
    checkpoint_every_steps: int | None = Field(default=50, ge=1, description="None: at the end only")
    keep_checkpoints: int = Field(default=2, ge=1)
    async_checkpoints: bool = Field(default=True, description="written by a thread while training goes on")
    parallel: Literal["auto", "none", "ddp", "fsdp"] = Field(
        default="auto", description="how processes started by torchrun share the work; docs/distributed.md"
    )
    log_every_steps: int = Field(default=1, ge=1)
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = Field(
        default=(), description="beside TensorBoard's files"
    )
    hardware_interval_seconds: float = Field(default=5.0, gt=0, description="between samples of the machine")
    prefetch_batches: int = Field(default=2, ge=0)
    sample_tokens: int = Field(default=48, ge=0, description="0: no samples")
    stop_after_steps: int | None = Field(
        default=None, ge=1, description="of this start of the run; then saves and stops, as on SIGTERM"
    )

    @model_validator(mode="before")
    @classmethod
    def _rows_of_the_preset(cls, settings: Any) -> Any:
        """A preset made for long rows brings their length, unless the run says otherwise."""
        model = settings.get("model") if isinstance(settings, dict) else None
        name = model.get("preset") if isinstance(model, dict) else getattr(model, "preset", None)
        preset = PRESETS.get(name) if isinstance(name, str) else None
        if preset is None or preset.seq_len is None or "seq_len" in settings:
            return settings
        return {**settings, "seq_len": preset.seq_len}

    @model_validator(mode="before")
    @classmethod
    def _has_a_length(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and all(settings.get(key) is None for key in LENGTH_KEYS):
            return {**settings, "steps": DEFAULT_STEPS}
        return settings

    @model_validator(mode="after")
    def _length_and_schedule_agree(self) -> TrainConfig:
        lengths = [f"{key} is {value}" for key in LENGTH_KEYS if (value := getattr(self, key)) is not None]
        if len(lengths) > 1:
            raise ConfigError(f"{' and '.join(lengths)}, expected one of them", hint="leave one out, or set it to null")
        for key in ("min_epochs", "max_epochs"):
            _refuse_idle_key(self, key, is_idle=self.target_tokens is None, why="without target_tokens")
        for low, high in (("min_epochs", "max_epochs"), ("warmup_steps_min", "warmup_steps_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ConfigError(f"{low} is {least}, expected at most {high} ({most})", hint=f"lower {low}")
        for key in ("warmup_steps_min", "warmup_steps_max"):
            _refuse_idle_key(self, key, is_idle=self.warmup_steps is not None, why="with warmup_steps")
        for key, schedule in SCHEDULE_OF_KEY.items():
            is_idle = self.schedule != schedule
            _refuse_idle_key(self, key, is_idle=is_idle, why=f"with schedule {self.schedule!r}, but with {schedule!r}")
        is_unwatched = self.patience is None and not self.keep_best
        _refuse_idle_key(self, "min_delta", is_idle=is_unwatched, why="without patience or keep_best")
        return self

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
        self.stream  # noqa: B018  refuses settings of order and transforms that would do nothing
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas is {list(self.betas)}, expected two numbers of at least 0 and below 1",
                hint="the usual values are [0.9, 0.95]",
            )
        return self

    @property
    def stream(self) -> StreamSettings:
        """Order and transforms."""
        return StreamSettings.of(dict(self))

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up."""
        return self.learning_rate if self.learning_rate is not None else self.model.learning_rate

    @property
    def num_steps(self) -> int:
        """Updates of the run. Of a run by passes it is known once its rows are: see length.py."""
        assert self.steps is not None, "a run by passes has no steps before its rows are counted"
        return self.steps

    @property
    def num_warmup_steps(self) -> int:
        """Steps of warm-up: as given, else ceil(ratio * steps) within its limits; never more than the run has."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, self.num_steps)
        ratio = DEFAULT_WARMUP_RATIO if self.warmup_ratio is None else self.warmup_ratio
        # Exact, because 70 * 0.1 is 7.000000000000001 in floats, whose ceiling is 8.
        steps = max(math.ceil(Fraction(str(ratio)) * self.num_steps), self.warmup_steps_min or 0)
        return min(steps, self.num_steps if self.warmup_steps_max is None else self.warmup_steps_max, self.num_steps)

    @property
    def is_by_passes(self) -> bool:
        """Whether the run's length is a number of passes over its rows."""
        return self.epochs is not None or self.target_tokens is not None

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the lowest held-out loss stays."""
        return self.patience is not None if self.keep_best is None else self.keep_best

    @property
    def names_weights(self) -> bool:
        """Whether it says how sources are mixed; else a resumed run keeps the weights that it had."""
        return bool({"mix", "mix_temperature"} & self.model_fields_set)

    def with_mix_of(self, run_folder: Path) -> TrainConfig:
        """The same with what the last start of a run said about its mixture, where this one says nothing."""
        path = run_folder / CONFIG_NAME
        if not path.is_file():
            return self
        try:
            saved = json.loads(path.read_bytes())
            last = TrainConfig.model_validate({key: saved[key] for key in MIX_KEYS if key in saved})
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} isn't the config of a run ({error})", hint="remove it, and name the weights anew with --mix"
            ) from error
        unsaid = last.model_fields_set - self.model_fields_set
        return self.model_copy(update={key: getattr(last, key) for key in unsaid})

    def bound_settings(self) -> dict[str, Any]:
        """What a checkpoint must agree with, as JSON values by dotted key."""
        # The steps of a run by passes follow from its rows, which the store's digest binds.
        free = {*FREE_KEYS, "steps"} if self.is_by_passes else set(FREE_KEYS)
        settings = self.model_dump(mode="json", exclude=free)
        model = settings.pop("model")
        return {**settings, **{f"model.{key}": value for key, value in model.items()}}

    def digest(self) -> str:
        """Names the bound settings."""
        return digest_of(self.bound_settings())


def _refuse_idle_key(config: TrainConfig, key: str, *, is_idle: bool, why: str) -> None:
    value = getattr(config, key)
    if is_idle and value is not None:
        raise ConfigError(f"{key} is {value}, which does nothing {why}", hint=f"leave {key} out, or set it to null")


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a file, `overrides` such as `model.num_layers=6` laid over it; values are YAML scalars."""
    return load_adapted(path, overrides)[0]


def load_adapted(path: Path | None = None, overrides: Sequence[str] = ()) -> tuple[TrainConfig, Adaptation | None]:
    """The same, and what became of the file's keys where it was written for another trainer; see adapters."""
    over: dict[str, Any] = {}
    for override in overrides:
        _lay_over(over, override)
    settings, adaptation = ({}, None) if path is None else _adapted_settings(path, over)
    if adaptation is not None:
        adaptation = adaptation.overridden(_places_taken(overrides, over))
    _make_room(settings, over)
    for override in overrides:
        _lay_over(settings, override)
    try:
        return TrainConfig.model_validate(settings), adaptation
    except ValidationError as error:
        raise _as_config_error(error, path=path, over=over) from error


def _adapted_settings(path: Path, over: dict[str, Any]) -> tuple[dict[str, Any], Adaptation | None]:
    from penstock.train.adapters import adapted

    settings = _read_settings(path)
    model = over.get("model")
    pretrained = model.get("pretrained") if isinstance(model, dict) else None
    adaptation = adapted(settings, path=path, ours=frozenset(TrainConfig.model_fields), pretrained=pretrained)
    return (settings, None) if adaptation is None else (adaptation.settings, adaptation)


def _make_room(settings: dict[str, Any], over: dict[str, Any]) -> None:
    """Takes out of a file's settings what can't stand beside those laid over it: its epochs, beside steps=10."""
    for key, rivals in RIVALS.items():
        if over.get(key) is not None:
            for rival in rivals:
                settings.pop(rival, None)


def _places_taken(overrides: Sequence[str], over: dict[str, Any]) -> dict[str, str]:
    """The dotted keys that overrides set, and those that leave because of them, each with its override."""
    places = {override.partition("=")[0].strip(): override for override in overrides}
    rivals = {rival: key for key, rivals in RIVALS.items() if over.get(key) is not None for rival in rivals}
    return {**{rival: places[key] for rival, key in rivals.items()}, **places}


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


def _as_config_error(error: ValidationError, *, path: Path | None, over: Mapping[str, Any]) -> ConfigError:
    """The first problem in our words; unknown keys come first, as they explain the others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    where = "" if path is None or _is_laid_over(first["loc"], over) else f" in {path}"
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_beside(first["loc"])
        elsewhere = [name for name in _known_everywhere() if name.rpartition(".")[2] == str(first["loc"][-1])]
        perhaps = f"perhaps {' or '.join(elsewhere)}; " if elsewhere else ""
        return ConfigError(
            f"unknown setting {key!r}{where}", hint=f"{perhaps}known settings: {nearest_first(key, known)}"
        )
    more = f" ({len(problems) - 1} more settings are wrong too)" if len(problems) > 1 else ""
    message = f"{key} is {first['input']!r}{where}: {first['msg']}{more}"
    return ConfigError(message, hint=f"set {key} to such a value, or leave it out for the default")


def _is_laid_over(location: tuple[int | str, ...], over: Any) -> bool:
    """Whether an override gave what stands there, and not the file."""
    for part in location:
        if not isinstance(over, dict):
            return True
        if part not in over:
            return False
        over = over[part]
    return True


def _known_beside(location: tuple[int | str, ...]) -> list[str]:
    """The settings of the level that a key was looked for in, with their dots."""
    return _dotted(location[:-1], _LEVELS.get(location[:-1], TrainConfig))


def _known_everywhere() -> list[str]:
    return [name for parents, settings in _LEVELS.items() for name in _dotted(parents, settings)]


def _dotted(parents: tuple[int | str, ...], settings: type[Settings]) -> list[str]:
    prefix = "".join(f"{part}." for part in parents)
    return [f"{prefix}{name}" for name in settings.model_fields]


_LEVELS: dict[tuple[int | str, ...], type[Settings]] = {
    (): TrainConfig,
    ("model",): ModelConfig,
    ("model", "adapter"): AdapterConfig,
}
