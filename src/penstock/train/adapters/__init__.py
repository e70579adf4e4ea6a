"""Settings that were written for other trainers, as ours.

    expert manifests (schemas 1.0, 2.0)      experts      a base model, an adapter, a data set, a config
    training_config.yaml                     training_config   sized to the machine
    flags of a pre-tokenised training        flags        a flat mapping of its flags

In: a mapping. Out: None where it is a config of ours, else an `Adaptation`: our settings, and what became of every key
(takes effect, not applicable, refused). Which it is gets decided by its shape (`adapted`) and is said with the run. A
refused key is an error. No torch, nothing written; files are only looked for, to tell a folder from a hub id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.hardware import Hardware, probe
from penstock.train.adapters.adaptation import Adaptation, ExpertData, TaskData
from penstock.train.adapters.experts import adapt_expert, is_expert
from penstock.train.adapters.flags import adapt_flags, is_flags
from penstock.train.adapters.rules import Adapted, without_comments
from penstock.train.adapters.training_config import adapt_training_config, is_training_config

__all__ = ["Adaptation", "Adapted", "ExpertData", "TaskData", "adapted"]


def adapted(
    settings: Mapping[str, Any],
    *,
    path: Path,
    ours: frozenset[str],
    pretrained: str | None = None,
    hardware: Hardware | None = None,
) -> Adaptation | None:
    """Somebody else's settings as ours; None where they are ours already.

    Args:
        settings: what the file holds.
        path: the file, for messages and for paths in it.
        ours: names of our own settings.
        pretrained: the base model asked for on the command line.
        hardware: the machine to size things to; None: this one.

    Raises:
        ConfigError: an unknown or refused key, a value of another kind, a manifest that isn't whole.
    """
    where = str(path)
    if is_expert(settings):
        adaptation = adapt_expert(without_comments(settings), where=where, folder=path.parent, pretrained=pretrained)
    elif is_training_config(settings):
        adaptation = adapt_training_config(without_comments(settings), where=where, hardware=hardware or probe())
    elif is_flags(settings, ours):
        adaptation = adapt_flags(without_comments(settings), where=where)
    else:
        return None
    for one in adaptation.adapted:
        if one.outcome == "refused":
            raise ConfigError(
                f"{one.key} is {one.value!r:.120} in {where}, which is refused: {one.detail}",
                hint=f"leave {one.key} out, or give another value; docs/configuration.md lists them",
            )
    return adaptation
