"""A store in TensorFlow: a tf.data.Dataset for a Keras model.

penstock prepare stdlib: --out store
python examples/tensorflow_keras.py store
"""

from __future__ import annotations

import sys

import tensorflow as tf

import penstock
from penstock.load.tensorflow import TensorFlowLoader

SEQ_LEN, BATCH_ROWS, STEPS, WIDTH = 128, 8, 20, 64


def main(path: str) -> list[float]:
    """Trains a bigram model for a few steps; returns the mean loss of the first and the second half."""
    tf.keras.utils.set_random_seed(0)
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        vocab_size = store.manifest.tokenizer["vocab_size"]
        loader = TensorFlowLoader(plan, batch_rows=BATCH_ROWS, seed=1)
        model = tf.keras.Sequential([tf.keras.layers.Embedding(vocab_size, WIDTH), tf.keras.layers.Dense(vocab_size)])
        model.compile(
            tf.keras.optimizers.AdamW(1e-2),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100),
        )
        pairs = loader.dataset().map(lambda batch: (batch["input_ids"], batch["labels"]))
        history = model.fit(pairs, epochs=2, steps_per_epoch=STEPS // 2, verbose=0)
    losses: list[float] = history.history["loss"]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
