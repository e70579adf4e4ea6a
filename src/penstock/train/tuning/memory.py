"""How much memory a step takes: one formula.

In: sizes of a model and the choices of a run. Out: bytes by part. With N tokens in a micro-batch (rows x T), L layers,
width D, key/value width K, feed-forward width F, vocabulary V, and e bytes per number in the compute precision:

    weights      as stored (float32: 4 a parameter)
    copies       e a multiplied parameter where autocast computes in another precision than the weights have
    gradients    as stored, trained parameters only
    optimizer    8, 4 or about 2 bytes a trained parameter (adamw, adamw-bf16, adamw-8bit)
    activations  N x [ kept layers x A  +  other layers x 2eD + 12D ],  A = e(D + 2K + 4F) + 28D + mask
    at a time    the larger of: logits, N x V x (12 + e) plain, or one chunk's of it + (4 + e)VD for the head's gradient
                 (with Triton, a chunk of C: C x V x e);
                 one layer in its backward pass, N x A, twice where its activations are computed again
    reserve      on a GPU: 768 MiB for context, libraries and workspaces

`mask` is T x e where documents are kept apart by a dense mask. All layers keep their activations without activation
checkpointing, every second one with `selective`, none with `full`; the others keep their two inputs. The coefficients
are counted from what autograd keeps of the built-in decoder; tests compare the sum with the tensors alive on a CPU at a
step's peak: it lies within 20 % above, with activation checkpointing in bfloat16 up to 50 %. Compiled code keeps less.
On a GPU it isn't measured yet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from penstock.train.tuning.facts import ModelFacts

__all__ = ["DENSE_MASK_KERNELS", "OPTIMIZER_BYTES", "MemoryEstimate", "chunk_logits_bytes", "estimated_memory"]

# Per trained parameter. 8-bit: two codes of a byte and two float32 scales per block of 256.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw-bf16": 4.0, "adamw-8bit": 2.0 + 8 / 256}
GPU_RESERVE_BYTES = 768 * 2**20
# Float32 logits of a chunk of the chunked loss. On a CPU they should stay near the caches; on a GPU the larger the
# better (577 k tokens/s in one chunk, 569 in seven: 124M on an H200), so they get a share of its memory.
CPU_CHUNK_BYTES = 16 * 2**20
CHUNK_SHARE = 1 / 16
# Kernels that keep documents apart by a dense mask; the others need none.
DENSE_MASK_KERNELS = frozenset({"sdpa", "cudnn", "efficient"})


def chunk_logits_bytes(gpu_memory_bytes: int | None) -> int:
    """The most that a chunk's logits take, counted in float32; None for a CPU."""
    return CPU_CHUNK_BYTES if gpu_memory_bytes is None else int(CHUNK_SHARE * gpu_memory_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes by part."""

    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    at_a_time: int
    reserve: int

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(asdict(self).values())


def estimated_memory(
    facts: ModelFacts,
    *,
    device: str,
    dtype: str,
    rows: int,
    seq_len: int,
    optimizer: str = "adamw",
    loss_kernel: str = "plain",
    activation_checkpointing: str = "none",
    attention: str = "sdpa",
    document_boundaries: bool = True,
    gpu_memory_bytes: int | None = None,
    has_fused_loss: bool = False,
) -> MemoryEstimate:
    """What one micro-batch of `rows` rows takes at its peak, the optimizer's state already there."""
    number_bytes = 2 if dtype == "bfloat16" else 4
    tokens = rows * seq_len
    stored_bytes = facts.weight_bytes / max(1, facts.num_multiplied)
    has_copies = dtype == "bfloat16" and stored_bytes > 3  # weights that are half precision already aren't copied
    mask_bytes = seq_len * number_bytes if document_boundaries and attention in DENSE_MASK_KERNELS else 0
    layer_bytes = (
        number_bytes * (facts.hidden_size + 2 * facts.kv_size + 4 * facts.feed_forward_size)
        + 28 * facts.hidden_size
        + mask_bytes
    )
    kept = _kept_layers(facts.num_layers, activation_checkpointing)
    others = facts.num_layers - kept
    per_token = kept * layer_bytes + others * 2 * number_bytes * facts.hidden_size + 12 * facts.hidden_size
    numbers = tokens * facts.padded_vocab_size
    logits_bytes = numbers * (12 + number_bytes)
    if loss_kernel != "plain":
        # Where loss and gradient are one kernel, the gradient takes the place of the logits.
        per_number = number_bytes if has_fused_loss else 12 + number_bytes
        head_bytes = (4 + number_bytes) * facts.padded_vocab_size * facts.hidden_size
        most_numbers = chunk_logits_bytes(gpu_memory_bytes) // (number_bytes if has_fused_loss else 4)
        logits_bytes = min(numbers, most_numbers) * per_number + head_bytes
    return MemoryEstimate(
        weights=facts.weight_bytes,
        copies=number_bytes * facts.num_multiplied if has_copies else 0,
        gradients=facts.gradient_bytes,
        optimizer=int(OPTIMIZER_BYTES[optimizer] * facts.num_trained),
        activations=int(tokens * per_token),
        at_a_time=max(logits_bytes, tokens * layer_bytes * (2 if others else 1)),
        reserve=GPU_RESERVE_BYTES if device == "cuda" else 0,
    )


def _kept_layers(num_layers: int, activation_checkpointing: str) -> int:
    return {"none": num_layers, "selective": num_layers // 2, "full": 0}[activation_checkpointing]
