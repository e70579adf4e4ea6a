"""`make_plan`: a store and the name of a policy in, a plan out; the one way from options to rows."""

from __future__ import annotations

import time
from typing import Any

from penstock.errors import PlanError, nearest_first
from penstock.pack.cache import cached_spans, keep_spans
from penstock.pack.concat import plan_concat
from penstock.pack.plan import Integers, Plan, is_whole_number, refuse_length
from penstock.pack.spans import plan_spans
from penstock.store import Store

__all__ = ["POLICIES", "checked_policy", "make_plan", "plan_of"]

POLICIES = ("concat", "best-fit", "windows", "pad")

# What takes less to make than this is made again.
SECONDS_WORTH_KEEPING = 0.5


def checked_policy(policy: str, *, seq_len: int, overlap: int = 0, overlap_loss: bool = False) -> None:
    """Refuses a policy that isn't known, an impossible length, and an overlap that the policy has no use for.

    Raises:
        PlanError: with the way out.
    """
    refuse_length(seq_len)
    if policy not in POLICIES:
        raise PlanError(f"packing {policy!r} isn't known", hint=f"known: {nearest_first(policy, POLICIES)}")
    if policy != "windows" and (overlap or overlap_loss):
        option = f"an overlap of {overlap}" if overlap else "loss on the overlap"
        raise PlanError(f"{option} does nothing in {policy!r}", hint="leave it out, or pack as windows")
    if not is_whole_number(overlap) or not 0 <= overlap < seq_len:
        raise PlanError(
            f"windows of {seq_len} tokens can't overlap by {overlap!r}", hint=f"choose 0 to {seq_len - 1} tokens"
        )


def make_plan(
    store: Store,
    *,
    policy: str = "concat",
    split: str = "train",
    seq_len: int,
    overlap: int = 0,
    boundaries: bool = True,
    overlap_loss: bool = False,
    documents: Integers | None = None,
) -> Plan:
    """Plans rows of `seq_len` inputs over the kept documents of a split.

    Args:
        policy: `concat`, `best-fit`, `windows` or `pad`.
        overlap: of windows: tokens that a row repeats from the one before.
        boundaries: False lets labels and attention cross from one document into the next.
        overlap_loss: whether what windows repeat counts as a label again.
        documents: numbers of the documents to plan over, ascending; None for all of the split. Whoever chooses says so
            in an identity of its own: the plan's is that of the split.

    Raises:
        PlanError: an unknown policy, an impossible length or overlap, or nothing to make rows of.
    """
    checked_policy(policy, seq_len=seq_len, overlap=overlap, overlap_loss=overlap_loss)
    if policy == "concat":
        return plan_concat(store, split=split, seq_len=seq_len, boundaries=boundaries, documents=documents)
    stride = seq_len - overlap
    key = {"store": store.digest, "split": split, "seq_len": seq_len, "stride": stride, "shared": policy == "best-fit"}
    arrays = cached_spans(key, store) if documents is None else None
    started = time.perf_counter()
    plan = plan_spans(
        store,
        policy=policy,
        split=split,
        seq_len=seq_len,
        stride=stride,
        boundaries=boundaries,
        overlap_loss=overlap_loss,
        documents=documents,
        arrays=arrays,
    )
    if arrays is None and documents is None and time.perf_counter() - started > SECONDS_WORTH_KEEPING:
        keep_spans(key, plan)
    return plan


def plan_of(store: Store, identity: dict[str, Any]) -> Plan:
    """The plan of a store that has the options of a plan's `identity`; whether it is the same plan, its own tells."""
    names = ("policy", "split", "seq_len", "boundaries", "overlap", "overlap_loss")
    return make_plan(store, **{name: identity[name] for name in names if name in identity})
