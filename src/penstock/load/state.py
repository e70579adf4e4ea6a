"""A place in a stream, saved: how many rows were consumed, and of what.

The same state serves every reader of a stream (`Loader`, the PyTorch data sets, JAX, Grain, tf.data), any world size,
worker count and batch size. It is JSON of under 4 KB, made and restored in constant time. The identity holds whatever
decides which tokens stand at a position: store, plan, order, seed, transforms.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import ConfigError, ResumeError
from penstock.hashing import digest_of

__all__ = ["check_identity_size", "position_in", "saved_state"]

STATE_FORMAT = 1
MOST_STATE_BYTES = 4096
# What a position, the format and a reader's own few numbers take in it.
ROOM_BESIDE_IDENTITY = 512
MOST_SHOWN = 200
# Positions are counted in 64 bits, and a batch goes on from them.
LAST_POSITION = 2**62

Identity = dict[str, Any]


def saved_state(position: int, identity: Identity) -> dict[str, Any]:
    """The state of a stream of which `position` rows were consumed, by all ranks."""
    return {"format": STATE_FORMAT, "position": position, "identity": identity}


def position_in(state: Any, identity: Identity) -> int:
    """The position of a saved state.

    Raises:
        ResumeError: it is no state, or the state of another store, plan, order or transform; both sides are shown.
    """
    position, saved = _checked(state)
    if saved != identity:
        differing = [name for name in {**identity, **saved} if saved.get(name) != identity.get(name)]
        shown = "; ".join(
            f"{name}: saved {_shown(saved.get(name))}, here {_shown(identity.get(name))}" for name in differing
        )
        raise ResumeError(
            f"the state {digest_of(saved)[:12]} doesn't fit this loader {digest_of(identity)[:12]}: {shown}",
            hint="open the same store version with the same row length, split, order, transforms and seed, or start "
            "afresh",
        )
    return position


def check_identity_size(identity: Identity) -> None:
    """Refuses an identity that can't be kept in a small state; a user's own transform may bring anything."""
    try:
        size = len(json.dumps(identity))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the settings of a transform or order must be plain JSON values ({error})",
            hint="use strings, numbers, lists and dicts; of larger things put a hash in",
        ) from None
    if size > MOST_STATE_BYTES - ROOM_BESIDE_IDENTITY:
        raise ConfigError(
            f"the stream's identity takes {size} bytes, room is for {MOST_STATE_BYTES - ROOM_BESIDE_IDENTITY}",
            hint="put a hash of large settings into a transform's identity, not the settings themselves",
        )


def _checked(state: Any) -> tuple[int, Identity]:
    """Position and identity of a saved state; a checkpoint is input, so its shape is looked at first."""
    fields = state if isinstance(state, dict) else {}
    position, identity = fields.get("position"), fields.get("identity")
    if (
        fields.get("format") != STATE_FORMAT
        or not isinstance(identity, dict)
        or not isinstance(position, int)
        or isinstance(position, bool)
        or position < 0
    ):
        raise ResumeError("this isn't the saved state of a loader", hint="pass what `state_dict()` returned")
    if position > LAST_POSITION:
        raise ResumeError(
            f"the state's position {position} is beyond {LAST_POSITION}, the last one there is",
            hint="the state is damaged or was changed by hand: pass what `state_dict()` returned",
        )
    return position, identity


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
