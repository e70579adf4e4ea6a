"""Small random models of transformers, saved as folders: what a pretrained model is in these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _config_of(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        sizes = {"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    if kind == "falcon":  # its attention can't be replaced
        return transformers.FalconConfig(vocab_size=384, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    if kind == "granite":  # scales its scores by another number than 1/sqrt(8)
        return transformers.GraniteConfig(**SIZES, attention_multiplier=0.5)
    if kind == "mistral":
        return transformers.MistralConfig(**SIZES, sliding_window=8)
    if kind == "qwen2":  # query, key and value have a bias
        return transformers.Qwen2Config(**SIZES)
    if kind == "qwen3":
        return transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
    if kind == "gemma2":  # bends its logits: the head is more than one product
        return transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.05)
    if kind == "mamba":  # recurrent: has no mask to keep documents apart
        return transformers.MambaConfig(vocab_size=384, hidden_size=32, state_size=4, num_hidden_layers=2)
    return transformers.LlamaConfig(**SIZES)


def save_small_model(kind: str, folder: Path) -> None:
    """Writes a model of a kind, with weights large enough that a neighbour in the row would be felt."""
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(_config_of(kind))
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
