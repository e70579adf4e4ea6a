"""The train benchmark's peers: a loop written by hand, Hugging Face's Trainer, and Trainer with peft.

All train the architecture of our built-in decoder as it is exported: transformers' Llama with the same sizes, heads and
padded vocabulary. All read the same tokens, from a flat file, in rows of the same length, with attention over the whole
row: none of them keeps documents apart. What isn't timed is building the flat file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock import fs
from penstock.bench.step_clock import StepClock
from penstock.store import open_store
from penstock.train.shape import ModelShape

__all__ = ["peft_steps", "plain_loop_steps", "trainer_steps", "write_base_model", "write_tokens"]


def write_tokens(*, store: str, out: str) -> dict[str, Any]:
    """The train split as one flat file of tokens in store width."""
    with open_store(store) as opened, fs.atomic_file(Path(out)) as file:
        for document in opened.kept_documents("train"):
            file.write(np.ascontiguousarray(opened.document_tokens(int(document))).tobytes())
        return {"dtype": opened.dtype.str, "vocab_size": opened.tokenizer().vocab_size}


def llama_config(shape: dict[str, Any]) -> Any:
    """Our decoder's sizes as transformers' config."""
    from transformers import LlamaConfig

    from penstock.train.export import llama_config as exported_config

    return LlamaConfig(**exported_config(ModelShape(**shape), end_id=None), use_cache=False)


def _llama(shape: dict[str, Any]) -> Any:
    import transformers

    model_class: Any = transformers.LlamaForCausalLM
    return model_class(llama_config(shape))


def _flops(shape: dict[str, Any], seq_len: int) -> float:
    from penstock.train.model import flops_per_token

    return flops_per_token(ModelShape(**shape), seq_len)


def plain_loop_steps(
    *,
    tokens: str,
    dtype: str,
    shape: dict[str, Any],
    seq_len: int,
    batch_size: int,
    steps: int,
    warm_up_steps: int,
    learning_rate: float,
) -> dict[str, Any]:
    """A loop as a careful engineer writes it: compile, bf16, TF32, fused AdamW, SDPA, the next batch fetched ahead."""
    import torch

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    clock = StepClock(num_steps=steps, warm_up_steps=warm_up_steps, tokens_per_step=batch_size * seq_len)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model: Any = _plain_llama(shape).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=has_gpu
    )
    forward: Any = torch.compile(model) if has_gpu else model
    batches = _random_batches(tokens, dtype, seq_len=seq_len, batch_size=batch_size, device=device)
    inputs, labels = next(batches)
    for _ in range(steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=has_gpu):
            loss = forward(inputs, labels)
        inputs, labels = next(batches)  # while the device works
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step_done()
    parameters = sum(each.numel() for each in model.parameters())
    return clock.report(flops_per_token=_flops(shape, seq_len), final_loss=loss.item(), parameters=parameters)


def _random_batches(
    tokens: str, dtype: str, *, seq_len: int, batch_size: int, device: Any
) -> Iterator[tuple[Any, Any]]:
    import torch

    stream = np.memmap(tokens, dtype, "r")
    chance = np.random.default_rng(0)
    places = np.arange(seq_len + 1)
    while True:
        starts = chance.integers(0, len(stream) - seq_len - 1, batch_size)
        rows = torch.from_numpy(stream[starts[:, None] + places].astype(np.int64))
        if device.type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _plain_llama(shape: dict[str, Any]) -> Any:
    """A Llama in plain torch; returns the mean loss."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    heads, kv_heads, width = shape["num_heads"], shape["num_kv_heads"], shape["hidden_size"]
    head = width // heads

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return F.rms_norm(x, (width,), self.weight.to(x.dtype), shape["norm_eps"])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = Norm(), Norm()
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.gate_up = nn.Linear(width, 2 * shape["feed_forward_size"], bias=False)
            self.down = nn.Linear(shape["feed_forward_size"], width, bias=False)

        def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
            rows, length, _ = x.shape
            parts = self.qkv(self.norm_1(x)).split([heads * head, kv_heads * head, kv_heads * head], -1)
            q, k, v = (part.view(rows, length, -1, head).transpose(1, 2) for part in parts)
            attended = F.scaled_dot_product_attention(
                turned(q, cosine, sine), turned(k, cosine, sine), v, is_causal=True, enable_gqa=heads != kv_heads
            )
            x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
            gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    def turned(x: Any, cosine: Any, sine: Any) -> Any:
        first, second = x.chunk(2, -1)
        return (x * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape["padded_vocab_size"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape["num_layers"]))
            self.norm = Norm()
            self.head = nn.Linear(width, shape["padded_vocab_size"], bias=False)
            if shape["tie_embeddings"]:
                self.head.weight = self.embed.weight
            angles = torch.outer(
                torch.arange(shape["max_positions"]).float(),
                shape["rope_theta"] ** -(torch.arange(0, head, 2).float() / head),
            )
            both = torch.cat((angles, angles), -1)
            self.cosine: Any
            self.sine: Any
            self.register_buffer("cosine", both.cos(), persistent=False)
            self.register_buffer("sine", both.sin(), persistent=False)
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, inputs: Any, labels: Any) -> Any:
            x = self.embed(inputs)
            length = inputs.shape[1]
            for block in self.blocks:
                x = block(x, self.cosine[:length], self.sine[:length])
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Llama()


def trainer_steps(
    *,
    tokens: str,
    dtype: str,
    shape: dict[str, Any],
    seq_len: int,
    batch_size: int,
    steps: int,
    warm_up_steps: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Hugging Face's Trainer on the exported architecture, with its defaults but for `arguments`."""
    import torch

    clock = StepClock(num_steps=steps, warm_up_steps=warm_up_steps, tokens_per_step=batch_size * seq_len)
    torch.manual_seed(0)
    model = _llama(shape)
    figures = _trained(
        model, clock, tokens, dtype, seq_len=seq_len, batch_size=batch_size, steps=steps, arguments=arguments
    )
    return clock.report(flops_per_token=_flops(shape, seq_len), **figures)


def write_base_model(*, shape: dict[str, Any], out: str) -> dict[str, Any]:
    """A transformers folder of that shape with weights that were drawn: speed doesn't ask what they know."""
    import torch

    if not Path(out).exists():
        torch.manual_seed(0)
        _llama(shape).to(torch.bfloat16).save_pretrained(out)
    return {}


def peft_steps(
    *,
    base: str,
    tokens: str,
    dtype: str,
    seq_len: int,
    batch_size: int,
    steps: int,
    warm_up_steps: int,
    rank: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Trainer on a base model of transformers with peft's LoRA on every linear layer but the head."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    clock = StepClock(num_steps=steps, warm_up_steps=warm_up_steps, tokens_per_step=batch_size * seq_len)
    torch.manual_seed(0)
    in_half = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=in_half)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    figures = _trained(
        get_peft_model(model, config),
        clock,
        tokens,
        dtype,
        seq_len=seq_len,
        batch_size=batch_size,
        steps=steps,
        arguments=arguments,
    )
    return clock.report(flops_per_token=None, **figures)


def _trained(
    model: Any,
    clock: StepClock,
    tokens: str,
    dtype: str,
    *,
    seq_len: int,
    batch_size: int,
    steps: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Runs Trainer and times the wait for its batches, on the host."""
    import tempfile
    import time

    import torch
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(Dataset[dict[str, Any]]):
        """Rows of the flat file, as nearly everyone writes them."""

        def __init__(self) -> None:
            self.stream = np.memmap(tokens, dtype, "r")

        def __len__(self) -> int:
            return len(self.stream) // seq_len

        def __getitem__(self, row: int) -> dict[str, Any]:
            ids = torch.from_numpy(self.stream[row * seq_len : (row + 1) * seq_len].astype(np.int64))
            return {"input_ids": ids, "labels": ids}

    class Timed(Trainer):
        waited = 0.0

        def get_batch_samples(self, *given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            found = super().get_batch_samples(*given, **named)
            if clock.is_steady:
                self.waited += time.perf_counter() - started
            return found

    class Watching(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.step_done()

    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            **arguments,
        )
        trainer = Timed(model=model, args=settings, train_dataset=Rows(), callbacks=[Watching()])
        trainer.train()
    return {
        "data_share_percent": 100 * trainer.waited / clock.seconds,
        "parameters": sum(each.numel() for each in model.parameters()),
    }
