"""A causal language model of transformers, as the trainer wants it.

In: a folder that transformers can load, or a hub id. Out: `PretrainedModel`, which answers to `LanguageModel` and whose
parameters keep the names they have in transformers. Only weights in safetensors are read, code of a repository is never
run, and nothing is downloaded unless `network` allows it.

Packed rows: positions are counted from the begin of each document, and transformers builds the mask that keeps
attention inside from that (`find_packed_sequence_indices`), also for sliding windows; or attention takes the documents
by their borders (pretrained_attention.py). Not every architecture does: a recurrent one has no mask. So a model is
asked, with a few tokens, whether a document feels its neighbour, before it is trained; in the same way it is asked
whether its head is one matrix product, and whether a kernel over borders that was set by name does all it asks for.

Cost: the weights in memory once, one BLAKE3 pass over their files (about 3 GB/s), which names them in checkpoints.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from penstock.errors import ConfigError, MissingExtraError
from penstock.hashing import digest_of, strong_hash
from penstock.tokenize import Tokenizer
from penstock.tokenize.folders import TOKENIZER_FILES, folder_json, holds_tokenizer
from penstock.tokenize.hub import is_hub_id
from penstock.train.attention import BORDER_KERNELS, SDPA_BACKENDS, document_borders
from penstock.train.language_model import LanguageModel
from penstock.train.pretrained_attention import (
    BORDERS_ARGUMENT,
    UnfitAttentionError,
    can_take_borders,
    register,
    transformers_name,
)
from penstock.train.quiet_imports import quiet_import
from penstock.train.randomness import restore_random_state, saved_random_state
from penstock.train.shape import ModelShape

__all__ = [
    "PretrainedModel",
    "load_pretrained",
    "refuse_another_tokenizer",
    "refuse_felt_neighbours",
    "refuse_unfit_attention",
    "weights_digest",
]

# What describes a model and holds its weights; subfolders hold the same once more for other programs.
_HUB_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *TOKENIZER_FILES,
)
UNLIMITED_POSITIONS = 2**31 - 1
# Answers to the same question, rounded differently, agree to a thousandth of the largest; neighbours felt change more.
PROBE_TOLERANCE = 1e-3


class PretrainedModel(LanguageModel):
    """Wraps a `PreTrainedModel` with a language-modelling head. Made by `load_pretrained`.

    Shares its tables of modules and parameters instead of holding it as a child, so that names are the same.

    Attributes:
        causal: the model of transformers.
        peft: the same as peft wraps it, once it has an adapter.
    """

    causal: Any
    peft: Any

    def __init__(self, causal: Any, *, source: str, folder: Path, digest: str, vocab_size: int | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "causal", causal)  # not as a child: that would put its name before all others
        for table in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(self, table, getattr(causal, table))
        self.training = causal.training
        self.source = source
        self.folder = folder
        self.digest = digest
        self.adapter: dict[str, Any] | None = None
        self._vocab_size = vocab_size
        self._kernel = "sdpa"
        has_choice = bool(getattr(causal, "_supports_sdpa", False))
        flex = ("flex",) if getattr(causal, "_supports_flex_attn", False) else ()
        by_borders = BORDER_KERNELS if can_take_borders(causal) else ()
        self.attention_kernels = ("sdpa", *(SDPA_BACKENDS if has_choice else ()), *flex, *by_borders)
        self._head_is_one_product = _head_is_one_product(self)

    def forward(self, inputs: Tensor, document_ids: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
        """Ids [B, T], document ids [B, T] or None for no borders -> logits [B, T, vocabulary]."""
        with self._backend():
            logits: Tensor = self.causal(**self._arguments(inputs, document_ids, borders)).logits
        return logits

    def hidden(self, inputs: Tensor, document_ids: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
        """The same up to the head -> [B, T, D]."""
        with self._backend():
            output: Tensor = self.causal.base_model(**self._arguments(inputs, document_ids, borders)).last_hidden_state
        return output

    def _arguments(self, inputs: Tensor, document_ids: Tensor | None, borders: Tensor | None) -> dict[str, Any]:
        """What transformers' forward is given; borders where the kernel takes documents by them, and else by nothing
        but the positions."""
        given = {"input_ids": inputs, "position_ids": _positions(inputs, document_ids), "use_cache": False}
        if self._kernel in BORDER_KERNELS and document_ids is not None:
            given[BORDERS_ARGUMENT] = document_borders(document_ids) if borders is None else borders
        return given

    @property
    def head_weight(self) -> Tensor | None:
        """[vocabulary, D]; None where the head has a bias, an adapter, or scales its logits."""
        head = self.causal.get_output_embeddings()
        return head.weight if self._head_is_one_product and type(head) is nn.Linear else None

    def blocks(self) -> Sequence[nn.Module]:
        """The list of as many modules as the model has layers; none if there is no such list."""
        num_layers = self._text_config.num_hidden_layers
        lists = (each for each in self.causal.modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers)
        return list(next(lists, ()))

    def flops_per_token(self, seq_len: int) -> int:
        """6 for each number of a trained matrix, 4 of a frozen one, and 12*L*d*T for attention.

        A frozen matrix needs no gradient of its own, a third of the work. All experts of a mixture are counted.
        """
        tied_head = self.causal.get_output_embeddings()
        of_look_ups = {id(module.weight) for module in self.causal.modules() if isinstance(module, nn.Embedding)}
        of_look_ups -= {id(tied_head.weight)} if hasattr(tied_head, "weight") else set()
        multiplied = [each for each in self.parameters() if len(_true_size(each)) >= 2 and id(each) not in of_look_ups]
        products = sum((6 if each.requires_grad else 4) * _true_size(each).numel() for each in multiplied)
        return products + 12 * self.shape.num_layers * self.shape.hidden_size * seq_len

    @property
    def max_positions(self) -> int:
        """The longest row; models without a table of positions know no limit."""
        return int(getattr(self._text_config, "max_position_embeddings", None) or UNLIMITED_POSITIONS)

    @property
    def vocab_size(self) -> int:
        """Ids of the store's tokenizer, or all of the model's."""
        return self._vocab_size or self.padded_vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Logits per position."""
        return int(self.causal.get_output_embeddings().weight.shape[0])

    @property
    def shape(self) -> ModelShape:
        """The sizes that the architecture has in common with the built-in one."""
        config = self._text_config
        hidden_size, num_heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1
        if hidden_size % num_heads or hidden_size // num_heads % 2:  # heads of a size of their own
            num_heads = 1
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        return ModelShape(
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads if num_heads % num_kv_heads == 0 else num_heads,
            hidden_size=hidden_size,
            feed_forward_size=getattr(config, "intermediate_size", None) or 4 * hidden_size,
            max_positions=self.max_positions,
            rope_theta=10_000.0,
            norm_eps=1e-5,
            tie_embeddings=bool(config.tie_word_embeddings),
        )

    def description(self) -> dict[str, Any]:
        """Where the weights came from and their hash: a checkpoint of adapters is worth nothing beside others."""
        return {"kind": "pretrained", "source": self.source, "weights": self.digest, "adapter": self.adapter}

    @property
    def attention_kernel(self) -> str:
        """The kernel in use."""
        return self._kernel

    @attention_kernel.setter
    def attention_kernel(self, kernel: str) -> None:
        if kernel not in self.attention_kernels:
            raise ValueError(f"attention kernel {kernel!r} is none of {', '.join(self.attention_kernels)}")
        if len(self.attention_kernels) > 1:
            if kernel in BORDER_KERNELS:
                register()
            self.causal.set_attn_implementation(transformers_name(kernel))
        self._kernel = kernel

    def keep_wrapper(self, wrapper: Any) -> None:
        """Keeps peft's view of the same modules, which knows how adapters are saved and merged."""
        object.__setattr__(self, "peft", wrapper)

    def train(self, mode: bool = True) -> PretrainedModel:
        """Sets the wrapped module's own flag too: it is no child."""
        super().train(mode)
        self.causal.training = mode
        return self

    def _backend(self) -> AbstractContextManager[None]:
        return sdpa_kernel(SDPA_BACKENDS[self._kernel]) if self._kernel in SDPA_BACKENDS else nullcontext()

    @property
    def _text_config(self) -> Any:
        return self.causal.config.get_text_config()


def load_pretrained(
    source: str,
    *,
    dtype: torch.dtype,
    network: bool = False,
    vocab_size: int | None = None,
    quantize: str | None = None,
    device: torch.device | None = None,
) -> PretrainedModel:
    """Loads a model on the CPU, in evaluation mode; with `quantize`, on the GPU.

    Args:
        source: a folder, or if there is none of that name, a hub id.
        dtype: of the weights in memory.
        network: whether a hub id may be downloaded.
        vocab_size: of the store's tokenizer; refused if the model has fewer ids.
        quantize: `nf4` for weights of 4 bits, which compute in bfloat16.
        device: where weights of 4 bits go.

    Raises:
        ConfigError: nothing is there, it isn't a causal model of safetensors, or it doesn't fit the tokenizer.
    """
    try:
        with quiet_import():
            from transformers import AutoModelForCausalLM
    except ImportError:
        raise MissingExtraError("transformers", extra="hf", wanted_for=f"model.pretrained={source}") from None
    folder = Path(source) if Path(source).is_dir() else _hub_folder(source, network=network)
    options: dict[str, Any] = {"dtype": dtype}
    if quantize is not None:
        options = _nf4_options(device or torch.device("cpu"))
    try:
        with quiet_import(), _quiet_loading():
            causal: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, trust_remote_code=False, **options
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # whatever a config.json leads to
        raise ConfigError(
            f"model.pretrained={source} can't be loaded: {_first_line(error)}",
            hint="give a folder with config.json and *.safetensors of a causal model that transformers has code for",
        ) from error
    num_ids = causal.get_input_embeddings().num_embeddings
    if vocab_size is not None and vocab_size > num_ids:
        raise ConfigError(
            f"the store's tokenizer has {vocab_size} ids, model.pretrained={source} has {num_ids}",
            hint=f"prepare the data with the model's own tokenizer: penstock prepare … --tokenizer {source}",
        )
    digest = weights_digest(folder)
    return PretrainedModel(causal, source=source, folder=folder, digest=digest, vocab_size=vocab_size)


def refuse_felt_neighbours(model: PretrainedModel) -> None:
    """Raises `ConfigError` if a document in a row changes what the model says about the next one."""
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None] % model.padded_vocab_size
    others = ids.clone()
    others[0, :4] = ids[0, :4].flip(0)
    documents = (torch.arange(8, device=ids.device) >= 4).long()[None]
    with _answering(model):
        first, second = model(ids, documents)[0, 4:], model(others, documents)[0, 4:]
    if not _agree(first, second):
        raise ConfigError(
            f"model.pretrained={model.source} ({type(model.causal).__name__}) feels other documents of the same row",
            hint="set document_boundaries=false, or pack=pad for rows of one document",
        )


def refuse_unfit_attention(model: PretrainedModel, kernel: str) -> None:
    """Raises `ConfigError` if a layer asks a kernel over borders, set by name, for more than it does.

    The model is asked, in training, since only then it has dropout; and without documents, which any device can do.
    """
    if kernel not in BORDER_KERNELS or kernel not in model.attention_kernels:
        return
    kernel_before, was_training, random_state = model.attention_kernel, model.training, saved_random_state()
    ids = torch.arange(1, 5, device=next(model.parameters()).device)[None] % model.padded_vocab_size
    try:
        model.attention_kernel = kernel
        with torch.no_grad():
            model.train().hidden(ids)
    except UnfitAttentionError as error:
        # Of the kernels that do more, flex has no dropout in transformers.
        has_flex = "flex" in model.attention_kernels and "dropout" not in error.wanted
        raise ConfigError(
            f"attention is {kernel!r}, which has no {', '.join(error.wanted.values())}: that is what the layers of "
            f"model.pretrained={model.source} ({type(model.causal).__name__}) ask for",
            hint=f"set attention=sdpa{' or attention=flex' if has_flex else ''}",
        ) from error
    finally:
        model.attention_kernel = kernel_before
        model.train(was_training)
        restore_random_state(random_state)


def refuse_another_tokenizer(model: PretrainedModel, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` if an id means one thing in the store and another to the model, as far as its folder says.

    Ids that only one of them has are no contradiction: tokens are added at the end of a vocabulary.
    """
    if not holds_tokenizer(model.folder):
        return
    source, _ = folder_json(model.folder)
    ours, theirs = _names_of_ids(tokenizer.spec.source_json), _names_of_ids(source)
    odd = [number for number in sorted(ours.keys() & theirs.keys()) if ours[number] != theirs[number]]
    if odd:
        first = odd[0]
        raise ConfigError(
            f"the store's tokenizer isn't that of model.pretrained={model.source}: {len(odd)} ids differ, the first is "
            f"{first}, {ours[first]!r} there and {theirs[first]!r} to the model",
            hint=f"prepare the data with the model's own: penstock prepare … --tokenizer {model.source}",
        )


def _names_of_ids(source: bytes) -> dict[int, str]:
    from tokenizers import Tokenizer as Reference

    vocabulary: dict[str, int] = Reference.from_str(source.decode()).get_vocab(with_added_tokens=True)
    return {number: name for name, number in vocabulary.items()}


def weights_digest(folder: Path) -> str:
    """Names the config and the weights of a folder by their content."""
    paths = sorted(path for path in folder.iterdir() if path.name == "config.json" or path.suffix == ".safetensors")
    return digest_of({path.name: _file_hash(path) for path in paths if path.stat().st_size})


def _file_hash(path: Path) -> str:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        return strong_hash(view).hex()


def _hub_folder(source: str, *, network: bool) -> Path:
    """The snapshot of a hub id on this disk, downloaded if that is allowed and needed."""
    if not is_hub_id(source):
        raise ConfigError(
            f"model.pretrained={source}: there is no such folder, and it is no hub id",
            hint="give a folder that holds config.json and *.safetensors, or a hub id such as Qwen/Qwen3-0.6B",
        )
    import huggingface_hub

    try:
        with _quiet_loading():
            folder = huggingface_hub.snapshot_download(
                source, allow_patterns=list(_HUB_FILES), local_files_only=not network
            )
    except Exception as error:  # the client raises its own, the HTTP library's and the system's errors
        where = "on this disk" if not network else f"to be had from the hub: {_first_line(error)}"
        raise ConfigError(
            f"model.pretrained={source} is no folder, and no hub id that is {where}",
            hint="check the id and the connection" if network else "add --network to download it, or give a folder",
        ) from error
    return Path(folder)


def _nf4_options(device: torch.device) -> dict[str, Any]:
    """How transformers is asked for 4-bit weights that compute in bfloat16."""
    if device.type != "cuda":
        raise ConfigError(
            f"model.quantize=nf4 needs a GPU, and the run is on {device.type}",
            hint="leave model.quantize out, or run on a machine with a GPU and pip install 'penstock[small]'",
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ConfigError(
            "model.quantize=nf4 needs the package 'bitsandbytes', which isn't installed",
            hint="pip install 'penstock[small]', or leave model.quantize out",
        ) from None
    transformers: Any = import_module("transformers")
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    return {"dtype": torch.bfloat16, "quantization_config": quantization, "device_map": {"": device}}


def _positions(inputs: Tensor, document_ids: Tensor | None) -> Tensor | None:
    """[B, T], counted from 0 at the begin of each document; None leaves it to transformers: from the row's begin."""
    if document_ids is None:
        return None
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return places - torch.where(begins, places, 0).cummax(1).values


def _head_is_one_product(model: PretrainedModel) -> bool:
    """Whether the logits are the hidden vectors times the head's weight, and nothing else."""
    head = model.causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        return False
    ids = torch.arange(1, 5, device=head.weight.device)[None] % head.weight.shape[0]
    with _answering(model):
        return _agree(F.linear(model.hidden(ids), head.weight), model(ids))


@contextmanager
def _answering(model: PretrainedModel) -> Iterator[None]:
    """Without dropout, gradients and any trace in the random state, which evaluation never touches."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _agree(first: Tensor, second: Tensor) -> bool:
    largest = float(second.abs().max())
    return float((first - second).abs().max()) <= PROBE_TOLERANCE * max(largest, 1e-6)


def _true_size(parameter: nn.Parameter) -> torch.Size:
    """A 4-bit weight is packed, and remembers what it was."""
    state: Any = getattr(parameter, "quant_state", None)
    size: torch.Size = parameter.shape if state is None else state.shape
    return size


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No bars of transformers and huggingface_hub between our own lines."""
    # Both offer only a switch for the whole process; what it was is put back.
    hub: Any = import_module("huggingface_hub.utils")
    bars: Any = import_module("transformers.utils.logging")
    had_bars, hub_had_bars = bars.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    bars.disable_progress_bar()
    hub.disable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            bars.enable_progress_bar()
        if hub_had_bars:
            hub.enable_progress_bars()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
