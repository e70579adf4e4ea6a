"""The size of the built-in decoder, decided: every number, nothing left to a rule.

In: a preset's name and a vocabulary size (`ModelConfig.shape` in config.py adds the overrides). Out: `ModelShape`,
which model.py builds from and a checkpoint keeps. Pure arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.errors import ConfigError

__all__ = ["PRESETS", "VOCAB_MULTIPLE", "ModelShape", "Preset", "padded_vocab_size"]

# Matrix kernels run at full speed only when each side is a multiple of the tile; 64 covers every current GPU.
VOCAB_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Every size of one decoder."""

    vocab_size: int  # of the tokenizer
    padded_vocab_size: int  # rows of the embedding and of the head
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    feed_forward_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.hidden_size is {self.hidden_size}, expected a multiple of model.num_heads ({self.num_heads})",
                hint=f"set model.hidden_size={self.num_heads * max(1, round(self.hidden_size / self.num_heads))}",
            )
        if self.head_size % 2:
            raise ConfigError(
                f"a head has {self.head_size} numbers, expected an even count: rotary positions turn pairs",
                hint="change model.hidden_size or model.num_heads so that hidden_size / num_heads is even",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads is {self.num_heads}, expected a multiple of model.num_kv_heads ({self.num_kv_heads})",
                hint=f"set model.num_kv_heads={self.num_heads} to give each head its own keys and values",
            )

    @property
    def head_size(self) -> int:
        """Numbers per attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named size, with the peak learning rate that suits it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    feed_forward_size: int
    learning_rate: float
    rope_theta: float = 10_000.0
    seq_len: int | None = None  # rows it is made for; None: whatever the run's are


# Heads of 128 from `small` up: the size attention kernels on current GPUs are written for. With GPT-2's vocabulary they
# have 7M, 124M, 360M, 0.84B and 1.8B parameters; docs/models.md has the table. `tiny` is the demo: 0.37 s a step of
# 8 x 256 tokens on two quiet CPU cores. Only its learning rate was tried here; the others follow the custom for their
# size.
_TINY = Preset(num_layers=4, num_heads=4, num_kv_heads=2, hidden_size=128, feed_forward_size=384, learning_rate=4e-3)
_SMALL = Preset(num_layers=12, num_heads=6, num_kv_heads=6, hidden_size=768, feed_forward_size=2048, learning_rate=6e-4)
_MEDIUM = Preset(
    num_layers=24, num_heads=8, num_kv_heads=8, hidden_size=1024, feed_forward_size=2816, learning_rate=3e-4
)
_LARGE = Preset(
    num_layers=27, num_heads=12, num_kv_heads=12, hidden_size=1536, feed_forward_size=4096, learning_rate=2.5e-4
)
_XLARGE = Preset(
    num_layers=32, num_heads=16, num_kv_heads=16, hidden_size=2048, feed_forward_size=5888, learning_rate=2e-4
)

# Rotary positions: under theta 10,000 with rows of 2k, a third of the pairs of a head of 128 turn less than once over
# the row, which tells positions far apart from each other; with rows of 32k only one in sixteen does. The thetas of
# the long presets keep the third: 39 % at 16k and 38 % at 32k.
PRESETS = {
    "tiny": _TINY,
    "small": _SMALL,
    "medium": _MEDIUM,
    "large": _LARGE,
    "xlarge": _XLARGE,
    "small-16k": replace(_SMALL, rope_theta=500_000.0, seq_len=16_384),
    "small-32k": replace(_SMALL, rope_theta=1_000_000.0, seq_len=32_768),
    "large-16k": replace(_LARGE, rope_theta=500_000.0, seq_len=16_384),
    "large-32k": replace(_LARGE, rope_theta=1_000_000.0, seq_len=32_768),
}


def padded_vocab_size(vocab_size: int) -> int:
    """The next multiple of 64."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
