"""The settings of a run's model: the built-in decoder by preset and sizes, or one of transformers by folder or hub id.

Part of config.py, with which it shares its rules: every key takes effect or is refused by name. Needs no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from penstock.errors import ConfigError, nearest_first
from penstock.train.shape import PRESETS, ModelShape, padded_vocab_size

__all__ = ["AdapterConfig", "ModelConfig", "Settings"]

# The custom for models that know something already; presets bring their own.
FINE_TUNING_LEARNING_RATE = 2e-5
ADAPTER_LEARNING_RATE = 2e-4


class Settings(BaseModel):
    """Frozen, and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise ConfigError(
            f"model.preset is {name!r}, which is unknown", hint=f"known presets: {nearest_first(name, PRESETS)}"
        )
    return name


class AdapterConfig(Settings):
    """Small trained matrices beside the frozen ones of a pretrained model."""

    kind: Literal["lora", "dora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: int | None = Field(default=None, ge=1, description="the adapter counts alpha / rank; None: twice the rank")
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="names of linear layers; None: all but the head"
    )

    @property
    def chosen_alpha(self) -> int:
        """The numerator of the adapter's weight."""
        return self.alpha or 2 * self.rank


class ModelConfig(Settings):
    """A preset of the built-in decoder and what differs from it (`None` keeps the preset's), or a pretrained model."""

    preset: Annotated[str, AfterValidator(_known_preset)] = "tiny"
    num_layers: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=2)
    feed_forward_size: int | None = Field(default=None, ge=1)
    max_positions: int | None = Field(default=None, ge=1, description="None: the preset's rows, or the run's seq_len")
    rope_theta: float | None = Field(default=None, gt=0, description="None: the preset's")
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = True
    pretrained: str | None = Field(default=None, min_length=1, description="a folder, or an id of the hub")
    adapter: AdapterConfig | None = None
    quantize: Literal["nf4"] | None = None
    float8: bool = Field(default=False, description="linear layers in float8, on GPUs that have it")

    @model_validator(mode="after")
    def _is_one_model(self) -> ModelConfig:
        if self.pretrained is None:
            for name in ("adapter", "quantize"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"model.{name} is set, and model.pretrained isn't: there is nothing learned to keep",
                        hint="set model.pretrained to a folder or a hub id, or leave it out",
                    )
            return self
        if self.quantize is not None and self.adapter is None:
            raise ConfigError(
                "model.quantize is nf4 without model.adapter: weights of 4 bits can't be trained themselves",
                hint="set model.adapter={kind: lora}, or leave model.quantize out",
            )
        if self.float8 and self.quantize is not None:
            raise ConfigError(
                "model.float8 and model.quantize are both set, expected one of them", hint="leave one of them out"
            )
        of_decoder = set(ModelConfig.model_fields) - {"pretrained", "adapter", "quantize", "float8"}
        for name in sorted(of_decoder):
            if getattr(self, name) != ModelConfig.model_fields[name].default:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)!r}, which does nothing with model.pretrained",
                    hint=f"leave model.{name} out: the pretrained model brings its own sizes",
                )
        return self

    @property
    def learning_rate(self) -> float:
        """The peak by custom, for a run that sets none."""
        if self.pretrained is None:
            return PRESETS[self.preset].learning_rate
        return FINE_TUNING_LEARNING_RATE if self.adapter is None else ADAPTER_LEARNING_RATE

    @property
    def summary(self) -> str:
        """The model in a few words, for reasons in the log."""
        if self.pretrained is None:
            return f"preset {self.preset}"
        return f"{self.adapter.kind} adapters" if self.adapter is not None else "a pretrained model"

    def shape(self, *, vocab_size: int, seq_len: int) -> ModelShape:
        """Every size of the built-in decoder decided; the vocabulary is padded to a multiple of 64."""
        preset = PRESETS[self.preset]
        num_heads = self.num_heads or preset.num_heads
        # A changed head count without a word about key/value heads: each head gets its own.
        num_kv_heads = self.num_kv_heads or (num_heads if self.num_heads else preset.num_kv_heads)
        max_positions = self.max_positions or max(seq_len, preset.seq_len or 0)
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
            rope_theta=self.rope_theta or preset.rope_theta,
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
        )
