"""Penstock: the pipe between data and accelerator.

    sources -> tokenize -> store -> pack -> load -> train -> report

The names below are the public interface. They are loaded when first used: `import penstock` itself pulls in neither
torch, jax, pyarrow nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "PenstockError": "penstock.errors",
    "Document": "penstock.sources",
    "Part": "penstock.sources",
    "Tokenizer": "penstock.tokenize",
    "load_tokenizer": "penstock.tokenize",
    "prepare": "penstock.store",
    "open_store": "penstock.store",
    "Store": "penstock.store",
    "verify": "penstock.store",
    "Plan": "penstock.pack",
    "make_plan": "penstock.pack",
    "plan_concat": "penstock.pack",
    "Loader": "penstock.load",
    "TorchLoader": "penstock.load.torch",
}

__all__ = [
    "Document",
    "Loader",
    "Part",
    "PenstockError",
    "Plan",
    "Store",
    "Tokenizer",
    "TorchLoader",
    "load_tokenizer",
    "make_plan",
    "open_store",
    "plan_concat",
    "prepare",
    "verify",
]

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.load import Loader
    from penstock.load.torch import TorchLoader
    from penstock.pack import Plan, make_plan, plan_concat
    from penstock.sources import Document, Part
    from penstock.store import Store, open_store, prepare, verify
    from penstock.tokenize import Tokenizer, load_tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
