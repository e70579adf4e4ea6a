"""A run's model as files that other programs load.

In: a run folder. Out: a folder, whole or absent, of

    transformers    model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json:
                    `AutoModelForCausalLM.from_pretrained(DIR)`; an adapter is merged into the weights it lies beside
    peft            adapter_model.safetensors, adapter_config.json and the tokenizer's two files:
                    `PeftModel.from_pretrained(base, DIR)`

and export.json with what it came from and checksums. The built-in decoder is a Llama with every name and number in
place, the vocabulary's padding kept; the logits are equal. Float32, as the weights were trained.

Memory: the model, in float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, InputError, nearest_first
from penstock.export.folder import ExportFolder, open_export_folder
from penstock.train.building import model_of_checkpoint
from penstock.train.checkpoint import CHECKPOINTS_NAME, Checkpoint, checkpoint_folders, find_latest, verified_checkpoint
from penstock.train.language_model import LanguageModel
from penstock.train.pretrained import PretrainedModel
from penstock.train.run import TOKENIZER_NAME
from penstock.train.safetensors_pieces import safetensors_pieces
from penstock.train.shape import ModelShape

__all__ = ["MODEL_FORMATS", "ModelExport", "export_model", "facts_of", "llama_config"]

MODEL_FORMATS = ("transformers", "peft")


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """What was written."""

    out: Path
    format: str
    step: int
    parameters: int
    num_files: int
    num_bytes: int
    seconds: float


def export_model(
    run_folder: Path,
    out: Path,
    *,
    output_format: str,
    step: int | None = None,
    force: bool = False,
    network: bool = False,
) -> ModelExport:
    """Writes the model of a run's newest whole checkpoint, or of the one after `step` updates.

    Args:
        run_folder: where `train` wrote.
        out: a folder that isn't there, is empty, or, with `force`, holds an earlier export.
        output_format: `transformers` or `peft`.
        step: of a checkpoint that is still kept.
        force: replace an earlier export.
        network: whether the pretrained model that the run began with may be downloaded.

    Raises:
        ConfigError: an unknown format, or `peft` of a run without an adapter.
        InputError: the run has no such checkpoint, or no tokenizer.
        ResumeError: a checkpoint is damaged, or the pretrained weights aren't those that the run began with.
        StoreError: `out` can't be used.
    """
    started = time.monotonic()
    if output_format not in MODEL_FORMATS:
        raise ConfigError(
            f"a run's model has no format {output_format!r}",
            hint=f"formats of a model: {nearest_first(output_format, MODEL_FORMATS)}; others are of stores",
        )
    checkpoint = _checkpoint(run_folder, step)
    tokenizer_json = _tokenizer_json(run_folder)
    model = model_of_checkpoint(checkpoint, network=network)
    with open_export_folder(out, store=run_folder / CHECKPOINTS_NAME, force=force) as folder:
        count = _write_adapter(folder, model) if output_format == "peft" else _write_whole(folder, model, checkpoint)
        _write_tokenizer(folder, tokenizer_json, checkpoint, max_positions=model.max_positions)
        folder.write_manifest(
            {
                "model": model.description(),
                "options": {"format": output_format},
                "run": {"step": checkpoint.step, "store_digest": checkpoint.state["store_digest"]},
            }
        )
    return ModelExport(
        out=out,
        format=output_format,
        step=checkpoint.step,
        parameters=count,
        num_files=len(folder.entries),
        num_bytes=sum(entry.bytes for entry in folder.entries),
        seconds=time.monotonic() - started,
    )


def _checkpoint(run_folder: Path, step: int | None) -> Checkpoint:
    if step is None:
        checkpoint = find_latest(run_folder)
        if checkpoint is None:
            raise InputError(f"{run_folder} holds no checkpoint", hint="train it first: penstock train … --out RUN")
        return checkpoint
    folders = {folder.name: folder for folder in checkpoint_folders(run_folder)}
    name = f"step-{step:08d}"
    if name not in folders:
        raise InputError(
            f"{run_folder} holds no checkpoint of step {step}",
            hint=f"it has {', '.join(folders) or 'none'}; without --step the newest is taken",
        )
    return verified_checkpoint(folders[name])


def _tokenizer_json(run_folder: Path) -> bytes:
    path = run_folder / TOKENIZER_NAME
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} can't be read: {error.strerror}",
            hint="copy the tokenizer.json of the run's store there, or resume the run, which writes it",
        ) from error


def _write_whole(folder: ExportFolder, model: LanguageModel, checkpoint: Checkpoint) -> int:
    """All weights, and the config that transformers builds the same architecture from."""
    end_id = checkpoint.state["tokenizer"]["end_id"]
    if isinstance(model, PretrainedModel):
        causal = model.causal if model.adapter is None else model.peft.merge_and_unload()
        config = {**json.loads(causal.config.to_json_string()), "dtype": "float32"}
        tensors: Mapping[str, Tensor] = {**dict(causal.named_parameters()), **_kept_buffers(causal)}
    else:
        config = llama_config(model.shape, end_id=end_id)
        tensors = dict(model.named_parameters())
    _write_tensors(folder, "model.safetensors", tensors)
    folder.write_json("config.json", config)
    folder.write_json("generation_config.json", {"eos_token_id": end_id})
    return sum(tensor.numel() for tensor in tensors.values())


def _kept_buffers(causal: Any) -> dict[str, Tensor]:
    """Buffers that belong to a model's state."""
    state = causal.state_dict()
    return {name: buffer for name, buffer in causal.named_buffers() if name in state}


def llama_config(shape: ModelShape, *, end_id: int | None) -> dict[str, Any]:
    """The built-in decoder in transformers' words; `rope_theta` by itself is how versions before 5 spell it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.padded_vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.feed_forward_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "dtype": "float32",
    }


def _write_adapter(folder: ExportFolder, model: LanguageModel) -> int:
    if not isinstance(model, PretrainedModel) or model.adapter is None:
        raise ConfigError(
            "the run trained no adapter, which is what format 'peft' writes", hint="take --format transformers"
        )
    peft: Any = import_module("peft")
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(model.peft)
    config = model.peft.peft_config["default"].to_dict()
    config = {**config, "inference_mode": True, "target_modules": _sorted(config["target_modules"])}
    _write_tensors(folder, "adapter_model.safetensors", tensors)
    folder.write_json("adapter_config.json", {name: _plain(value) for name, value in config.items()})
    return sum(tensor.numel() for tensor in tensors.values())


def _sorted(names: Any) -> Any:
    """A set of names has no order; the same run must give the same file."""
    return names if isinstance(names, str) else sorted(names)


def _plain(value: Any) -> Any:
    """Sets and enums as JSON has them."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)


def _write_tensors(folder: ExportFolder, name: str, tensors: Mapping[str, Tensor]) -> None:
    with folder.file(name) as file:
        for piece in safetensors_pieces(tensors, metadata={"format": "pt"}):
            file.write(piece)


def _write_tokenizer(folder: ExportFolder, source: bytes, checkpoint: Checkpoint, *, max_positions: int) -> None:
    """The tokenizer as it was, and which of its tokens ends a document."""
    from tokenizers import Tokenizer as Reference

    end_token = Reference.from_str(source.decode()).id_to_token(checkpoint.state["tokenizer"]["end_id"])
    with folder.file("tokenizer.json") as file:
        file.write(source)
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_token,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    folder.write_json("tokenizer_config.json", facts)


def facts_of(result: ModelExport) -> dict[str, Any]:
    """JSON values for people and programs."""
    return {**asdict(result), "out": str(result.out), "seconds": round(result.seconds, 3)}
