"""Stage 6: batches -> checkpoints.

    config, shape -> start -> choices -> [loss, optimizer, schedule] in loop -> evaluate, sample, checkpoint

Importing this package, its config or its shapes pulls in no torch: `train` and the others are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.train.config import ModelConfig, TrainConfig, load_config
from penstock.train.shape import ModelShape

if TYPE_CHECKING:
    from penstock.train.checkpoint import Checkpoint, find_latest
    from penstock.train.evaluate import Evaluation
    from penstock.train.loop import TrainResult, train
    from penstock.train.model import Decoder, build_model, flops_per_token, num_parameters

__all__ = [
    "Checkpoint",
    "Decoder",
    "Evaluation",
    "ModelConfig",
    "ModelShape",
    "TrainConfig",
    "TrainResult",
    "build_model",
    "find_latest",
    "flops_per_token",
    "load_config",
    "num_parameters",
    "train",
]

# No name here may equal a module's, such as `evaluate`: importing the module would take the name over.
_MODULE_OF = {
    "Checkpoint": "checkpoint",
    "Decoder": "model",
    "Evaluation": "evaluate",
    "TrainResult": "loop",
    "build_model": "model",
    "find_latest": "checkpoint",
    "flops_per_token": "model",
    "num_parameters": "model",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
