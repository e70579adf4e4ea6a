"""Importing torchao, or what looks for it (transformers, peft), without the lines it says about other machines.

When first imported, torchao logs a line for every kernel library of its wheel that isn't made for this machine, and
torch one for every constant that torchao registers in an old way. Those lines alone are held back: whatever else they
have to say is said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_import"]

# The logger, and what its known lines hold.
_KNOWN_LINES = {
    "torchao": ("Could not load this library",),
    "torch.utils._pytree": ("register_constant() on Enum subclasses is deprecated",),
}


class _WithoutKnownLines(logging.Filter):
    """Lets through what isn't known."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__()
        self.known = known

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in self.known)


@contextmanager
def quiet_import() -> Iterator[None]:
    """The block, in which something imports torchao."""
    filters = {logging.getLogger(name): _WithoutKnownLines(known) for name, known in _KNOWN_LINES.items()}
    for logger, each in filters.items():
        logger.addFilter(each)
    try:
        yield
    finally:
        for logger, each in filters.items():
            logger.removeFilter(each)
