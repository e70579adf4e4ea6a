"""The model of a run, built: from a config before its first step, or from a checkpoint.

In: the settings and the size of the store's vocabulary, or a verified checkpoint. Out: a `LanguageModel` on the CPU (on
the GPU where its weights are quantised). The same settings give the same weights to the last bit.

Weights that are trained are float32 whatever is computed in. Frozen ones are bfloat16 where the run computes in it:
they take half the memory and lose nothing that the product would keep.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ConfigError, ResumeError
from penstock.tokenize import Tokenizer
from penstock.train.adapting import add_adapter, use_float8
from penstock.train.checkpoint import (
    MODEL_NAME,
    Checkpoint,
    is_sharded,
    load_parameters,
    read_tensors,
    trained_parameters,
)
from penstock.train.config import TrainConfig
from penstock.train.language_model import LanguageModel
from penstock.train.model import build_model
from penstock.train.model_config import ModelConfig
from penstock.train.pretrained import (
    PretrainedModel,
    load_pretrained,
    refuse_another_tokenizer,
    refuse_felt_neighbours,
    refuse_unfit_attention,
)
from penstock.train.shape import ModelShape
from penstock.train.sharded_checkpoint import loaded_tensors

__all__ = ["model_of_checkpoint", "new_model", "refuse_another_base"]


def new_model(config: TrainConfig, tokenizer: Tokenizer) -> LanguageModel:
    """The model as it is before its first step."""
    device, vocab_size = _device(config), tokenizer.vocab_size
    if config.model.pretrained is None:
        shape = config.model.shape(vocab_size=vocab_size, seq_len=config.seq_len)
        model: LanguageModel = build_model(shape, seed=config.seed)
    else:
        computes_in_half = device.type == "cuda" and config.dtype != "float32"
        dtype = torch.bfloat16 if config.model.adapter is not None and computes_in_half else torch.float32
        base = _pretrained_model(
            config.model, dtype=dtype, network=config.network, vocab_size=vocab_size, device=device, seed=config.seed
        )
        refuse_another_tokenizer(base, tokenizer)
        if config.seq_len > base.max_positions:
            raise ConfigError(
                f"seq_len is {config.seq_len}, {config.model.pretrained} takes rows of at most {base.max_positions}",
                hint=f"set seq_len={base.max_positions} or less",
            )
        if config.document_boundaries:
            refuse_felt_neighbours(base)
        refuse_unfit_attention(base, config.attention)
        model = base
    if config.model.float8:
        use_float8(model, device)
    return model


def model_of_checkpoint(checkpoint: Checkpoint, *, network: bool = False) -> LanguageModel:
    """The model as it was saved, in float32 on the CPU and in evaluation mode; its pretrained base is looked up again.

    Raises:
        ConfigError: the pretrained base isn't where it was.
        ResumeError: it has other weights now.
    """
    settings = model_settings(checkpoint)
    shape = ModelShape(**checkpoint.state["shape"])
    if settings.pretrained is None:
        model: LanguageModel = build_model(shape, seed=0)
    else:
        # In full precision, also what was trained beside 4-bit weights: those of an export are looked at by others.
        exact = settings.model_copy(update={"quantize": None})
        model = _pretrained_model(
            exact,
            dtype=torch.float32,
            network=network,
            vocab_size=shape.vocab_size,
            device=torch.device("cpu"),
            seed=0,
        )
        refuse_another_base(model, checkpoint)
    if is_sharded(checkpoint):
        parameters = trained_parameters(model)
        tensors = loaded_tensors(checkpoint, parameters)
        load_parameters(model, {name: tensors[name] for name in parameters if name in tensors})
    else:
        load_parameters(model, read_tensors(checkpoint.path / MODEL_NAME))
    return model.eval()


def model_settings(checkpoint: Checkpoint) -> ModelConfig:
    """The `model.*` settings that a checkpoint was saved under."""
    settings: dict[str, Any] = checkpoint.state["settings"]
    named = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    return ModelConfig.model_validate(named)


def refuse_another_base(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Raises `ResumeError` if the pretrained weights aren't those that the checkpoint was trained beside."""
    saved, found = checkpoint.state.get("model", {}).get("weights"), model.description().get("weights")
    if saved != found:
        raise ResumeError(
            f"the run was trained from weights {saved}, those of {model.description().get('source')} are {found}",
            hint="put the pretrained model back as it was, or start with another --out",
        )


def _pretrained_model(
    settings: ModelConfig, *, dtype: torch.dtype, network: bool, vocab_size: int, device: torch.device, seed: int
) -> PretrainedModel:
    assert settings.pretrained is not None
    model = load_pretrained(
        settings.pretrained,
        dtype=dtype,
        network=network,
        vocab_size=vocab_size,
        quantize=settings.quantize,
        device=device,
    )
    if settings.adapter is not None:
        add_adapter(model, settings.adapter, seed=seed)
    return model


def _device(config: TrainConfig) -> torch.device:
    """Where the run will be; the process may have been given one GPU of several."""
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
