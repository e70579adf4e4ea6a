"""What the trainer asks of a model, whoever made it.

In: token ids [B, T] and, for packed rows, document ids [B, T]. Out: logits [B, T, V], or the vectors that the head
multiplies, so that a loss may form the logits piece by piece. The built-in decoder (model.py) and any causal model of
transformers (pretrained.py) answer to this class; loop, tuning, checkpoints and export know nothing else.

Parameters are known by their plain names: those of `named_parameters`, without what compiling and data-parallel
wrappers put in between. Frozen parameters (`requires_grad` off) are no part of a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from penstock.train.shape import ModelShape

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module, ABC):
    """A causal model over token ids."""

    @abstractmethod
    def forward(self, inputs: Tensor, document_ids: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
        """Ids [B, T], document ids [B, T] or None for no borders -> logits [B, T, padded vocabulary].

        `borders`, if given, say the same as the document ids: see `attention.document_borders`.
        """

    @abstractmethod
    def hidden(self, inputs: Tensor, document_ids: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
        """The same up to the head -> [B, T, D]: what `head_weight` multiplies."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor | None:
        """[padded vocabulary, D]; None where the head is more than one product: the loss then takes the logits."""

    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated layers in order: what is compiled, recomputed or sharded one by one."""

    def compiled_parts(self) -> Sequence[nn.Module]:
        """What is compiled one by one where not the whole is: the layers, unless a model knows more."""
        return self.blocks()

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one training step per token, forward and backward."""

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """The longest row the model takes."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids that can stand for text; the rest up to `padded_vocab_size` never occurs."""

    @property
    @abstractmethod
    def padded_vocab_size(self) -> int:
        """Logits per position."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The sizes, for arithmetic about memory; approximate where the architecture isn't the built-in one."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps and a resumed run must find again: what kind, made from what."""

    is_compiled = False
    """Whether compiling.py has the model, or its layers, compiled at the moment: the loss then is too."""

    attention_kernels: tuple[str, ...]
    """Those of `attention.KERNELS` that the model can be set to."""

    @property
    @abstractmethod
    def attention_kernel(self) -> str:
        """The kernel in use; may be set between steps, as tuning does."""

    @attention_kernel.setter
    @abstractmethod
    def attention_kernel(self, kernel: str) -> None: ...
