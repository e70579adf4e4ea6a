"""A store in JAX: batches on a mesh of all devices, exact resume.

penstock prepare stdlib: --out store
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_training.py store
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

import penstock
from penstock.load.jax import JaxBatch, JaxLoader

SEQ_LEN, BATCH_ROWS, STEPS, WIDTH, RATE = 128, 8, 20, 64, 30.0


def main(path: str) -> list[float]:
    """Trains a bigram model for a few steps; returns the losses."""
    losses = []
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        vocab_size = store.manifest.tokenizer["vocab_size"]
        keys = jax.random.split(jax.random.key(0))
        parameters = {
            "embedding": 0.1 * jax.random.normal(keys[0], (vocab_size, WIDTH)),
            "output": 0.1 * jax.random.normal(keys[1], (WIDTH, vocab_size)),
        }
        with JaxLoader(plan, batch_rows=BATCH_ROWS, seed=1) as loader:
            for _ in range(STEPS):
                batch: JaxBatch = next(loader)
                parameters, loss = step(parameters, batch.input_ids, batch.labels)
                losses.append(float(loss))
            print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} on {loader.sharding}; state: {loader.state_dict()}")
    return losses


def loss_of(parameters: dict[str, Any], input_ids: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy over the labels that count."""
    logits = parameters["embedding"][input_ids] @ parameters["output"]  # [B, T, vocabulary]
    counts = labels >= 0
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * counts) / jnp.sum(counts)


@jax.jit
def step(parameters: dict[str, Any], input_ids: jax.Array, labels: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """One step of plain gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, input_ids, labels)
    return jax.tree.map(lambda value, gradient: value - RATE * gradient, parameters, gradients), loss


if __name__ == "__main__":
    main(sys.argv[1])
