"""Stage 2: Document -> ids."""

from penstock.tokenize.loading import load_tokenizer
from penstock.tokenize.specification import TokenizerSpec
from penstock.tokenize.tokenizer import LossRuns, Tokenizer
from penstock.tokenize.training import DEFAULT_VOCAB_SIZE, TRAINING_SAMPLE_BYTES, train_tokenizer

__all__ = [
    "DEFAULT_VOCAB_SIZE",
    "TRAINING_SAMPLE_BYTES",
    "LossRuns",
    "Tokenizer",
    "TokenizerSpec",
    "load_tokenizer",
    "train_tokenizer",
]
