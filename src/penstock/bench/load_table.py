"""What the load benchmark found, as rows, ratios with their bars, and advice.

In: outcomes by subject. Out: rows by name; the ratios that were promised, judged on the first batch size; a few lines
that say what to choose on a machine like this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.bench.load_subjects import (
    COMPLETE,
    LITDATA,
    MEMORY_TORCH,
    MEMORY_WIRE,
    NUMPY_TORCH,
    NUMPY_WIRE,
    RESUME,
    TORCH_DEMAND,
    TORCH_THREAD,
    TORCH_TOKENS,
    WIRE_BEST_FIT,
    WIRE_DEMAND,
    WIRE_THREAD,
    Data,
    of_size,
    opening,
)
from penstock.bench.processes import Outcome, row_of
from penstock.bench.result import Bound, Ratio, Role, Row, fastest, ratio, ratio_to

__all__ = ["FIRST", "LATER", "WHOLE", "advice", "ratios", "table"]

FIRST, LATER = "first pass", "later passes"
WHOLE = COMPLETE

# Issue 5: M tokens/s as batches go on the wire, and of that in the first pass, with cold checksums.
WIRE_RATES = {WIRE_THREAD: 500.0, WIRE_BEST_FIT: 300.0}
FIRST_PASS_SHARE = 0.7
WHOLE_RATE = 150.0
TIMES_BEST_PEER_WHOLE = 2.0
TIMES_BEST_PEER_WIRE = 5.0
TIMES_LITDATA = 4.0
MOST_RESUME_MILLISECONDS = 50.0
MOST_OPENING_SECONDS = 1.0
LARGE_TOKENS = 10**9
ESTIMATE_WITHIN = 2.0
SMALLEST_STORE_MILLIONS = 50.0
"""A smaller store fits the processor's caches, and nothing is learnt from it."""

Rows = dict[str, Row]


def table(outcomes: Mapping[str, Outcome], data: Data) -> Rows:
    """Rows by name, in the order of the subjects."""
    rows: list[Row] = []
    for name, outcome in outcomes.items():
        task = outcome.subject.task
        if task == "loading_figures:resume_far":
            rows += _resume_rows(outcome)
        elif task == "loading_figures:open_and_load":
            rows.append(row_of(outcome, "seconds", unit="s", **_values(outcome, "opening_and_planning_seconds")))
        elif task.startswith("loading_memory:"):
            rows += _memory_rows(outcome, name)
        elif task.startswith("loading_orders:"):
            rows += _order_rows(outcome, name)
        else:
            rows += _rate_rows(outcome, name)
    asked = any(outcome.subject.task == "loading_figures:open_and_load" for outcome in outcomes.values())
    if not asked:
        reason = f"not asked for: --large-tokens {LARGE_TOKENS}"
        rows.append(Row(name=opening(LARGE_TOKENS, cached=True), role=Role.OURS, unit="s", skipped=reason))
    rows.append(Row(name="tokens in the rows", role=Role.OURS, unit="M tokens", values=(data.num_tokens / 1e6,)))
    return {row.name: row for row in rows}


def _values(outcome: Outcome, *keys: str) -> dict[str, Any]:
    return {key: [report[key] for report in outcome.reports] for key in keys}


def _rate_rows(outcome: Outcome, name: str) -> list[Row]:
    gives_tokens = outcome.subject.role is not Role.OURS
    what = f"{name}, torch int64 tokens" if gives_tokens and NUMPY_WIRE not in name else name
    rows = [
        row_of(
            outcome,
            key,
            name=f"{what}, {part}",
            unit="M tokens/s",
            scale=1e-6,
            first_batch_ms=[float(f"{1000 * report[first]:.3g}") for report in outcome.reports],
        )
        for key, part, first in (
            ("first_pass", FIRST, "first_batch_seconds"),
            ("later_passes", LATER, "later_first_batch_seconds"),
        )
    ]
    if gives_tokens and NUMPY_WIRE not in name:
        rows.append(row_of(outcome, "complete", name=f"{name}, {WHOLE}", unit="M tokens/s", scale=1e-6))
    return rows


def _resume_rows(outcome: Outcome) -> list[Row]:
    return [
        row_of(outcome, "seconds", name=RESUME, unit="ms", scale=1e3),
        row_of(
            outcome, "seconds_with_opening", name=f"{RESUME}, opening store and plan included", unit="ms", scale=1e3
        ),
    ]


def _memory_rows(outcome: Outcome, name: str) -> list[Row]:
    apart = ("mapped_bytes", "pss_bytes", "private_bytes", "process_bytes_before")
    known = [key for key in apart if all(key in report for report in outcome.reports)]
    return [
        row_of(outcome, "estimated_bytes", name=f"{name}, estimated", unit="MB", scale=1e-6),
        row_of(outcome, "measured_bytes", name=f"{name}, measured", unit="MB", scale=1e-6, **_values(outcome, *known)),
    ]


def _order_rows(outcome: Outcome, name: str) -> list[Row]:
    return [
        row_of(outcome, "mean_distance", name=f"{name}, distance of neighbours", unit="of a pass"),
        row_of(
            outcome,
            "in_one_batch",
            name=f"{name}, neighbours in one batch",
            unit="%",
            scale=100,
            percent_if_random=[100 * report["in_one_batch_if_random"] for report in outcome.reports],
        ),
    ]


def ratios(rows: Rows, data: Data) -> list[Ratio]:
    """Promises are judged on the loader as users get it, filled ahead by a thread; on demand stands beside it."""
    size = data.batch_sizes[0]

    def own(name: str, part: str = LATER) -> Row:
        return rows[f"{of_size(name, size)}, {part}"]

    peers = {part: _best_peer(rows, size, f"torch int64 tokens, {part}") for part in (FIRST, LATER)}
    litdata = _best_peer(rows, size, f"torch int64 tokens, {LATER}", of=LITDATA)
    return [
        *(
            ratio_to(f"{_policy(name)} on the wire, to the promise", own(name), rate)
            for name, rate in WIRE_RATES.items()
        ),
        *(
            ratio_to(
                f"{_policy(name)} on the wire, first pass, to the promise", own(name, FIRST), FIRST_PASS_SHARE * rate
            )
            for name, rate in WIRE_RATES.items()
        ),
        ratio("wire to the best peer", own(WIRE_THREAD), peers[LATER], required=TIMES_BEST_PEER_WIRE),
        ratio_to("tokens, labels and positions to the promise", own(TORCH_THREAD), WHOLE_RATE),
        ratio(
            "tokens, labels and positions to the best peer",
            own(TORCH_THREAD),
            _best_peer(rows, size, WHOLE),
            required=TIMES_BEST_PEER_WHOLE,
        ),
        ratio("torch int64 to litdata", own(TORCH_TOKENS), litdata, required=TIMES_LITDATA),
        ratio_to("resume to the limit", rows[RESUME], MOST_RESUME_MILLISECONDS, bound=Bound.AT_MOST),
        *_opening_ratios(rows),
        *_memory_ratios(rows, size),
        ratio("wire on demand to ahead by a thread", own(WIRE_DEMAND), own(WIRE_THREAD)),
        ratio("complete on demand to ahead by a thread", own(TORCH_DEMAND), own(TORCH_THREAD)),
        ratio("wire, first pass to the best peer's", own(WIRE_THREAD, FIRST), peers[FIRST]),
        ratio("wire to a bare numpy gather", own(WIRE_THREAD), own(NUMPY_WIRE)),
        ratio(
            "tokens, labels and positions to a bare numpy gather, completed",
            own(TORCH_THREAD),
            rows[f"{of_size(NUMPY_TORCH, size)}, {WHOLE}"],
        ),
        ratio_to("tokens to the fewest that count", rows["tokens in the rows"], SMALLEST_STORE_MILLIONS),
    ]


def _policy(name: str) -> str:
    return "best-fit" if name == WIRE_BEST_FIT else "concat"


def _best_peer(rows: Rows, size: int, what: str, *, of: str = "") -> Row:
    ending = f", batch {size}, {what}"
    return fastest(
        row for name, row in rows.items() if row.role is Role.PEER and name.endswith(ending) and name.startswith(of)
    )


def _opening_ratios(rows: Rows) -> list[Ratio]:
    """Only a store of 10^9 tokens is what was promised; a smaller one isn't judged."""
    row = rows.get(opening(LARGE_TOKENS, cached=True))
    name = "open and first batch to the limit"
    return [] if row is None else [ratio_to(name, row, MOST_OPENING_SECONDS, bound=Bound.AT_MOST)]


def _memory_ratios(rows: Rows, size: int) -> list[Ratio]:
    found = []
    for name in (MEMORY_WIRE, MEMORY_TORCH):
        estimated, measured = (rows[f"{of_size(name, size)}, {part}"] for part in ("estimated", "measured"))
        found += [
            ratio(f"{name}, {what}", of, over, required=ESTIMATE_WITHIN, bound=Bound.AT_MOST)
            for what, of, over in (
                ("estimate to measured", estimated, measured),
                ("measured to estimate", measured, estimated),
            )
        ]
    return found


def advice(rows: Rows, data: Data) -> list[str]:
    """What the figures say about settings; nothing where they weren't measured."""
    size = data.batch_sizes[0]
    lines: list[str] = []
    thread, demand = (rows[f"{of_size(name, size)}, {LATER}"].value for name in (WIRE_THREAD, WIRE_DEMAND))
    whole = rows[f"{of_size(TORCH_THREAD, size)}, {LATER}"].value
    if thread and demand:
        faster = "a thread that fills ahead (the default)" if thread >= demand else "prefetch_batches=0 (on demand)"
        lines.append(
            f"Advice: with nothing else running, {faster} gives more: {thread:.0f} M tokens/s ahead, {demand:.0f} on "
            "demand. Filling ahead hides the loader behind the training step wherever a core is free."
        )
    if thread and whole:
        lines.append(
            f"Advice: send the wire format and widen on the device: the host makes {thread / whole:.1f} times as many "
            f"tokens as with labels and positions ({thread:.0f} to {whole:.0f} M tokens/s)."
        )
    if memory := _memory_line(rows, data):
        lines.append(memory)
    return lines


def _memory_line(rows: Rows, data: Data) -> str | None:
    parts = []
    for size in data.batch_sizes:
        wire, whole = (rows[f"{of_size(name, size)}, estimated"].value for name in (MEMORY_WIRE, MEMORY_TORCH))
        if wire and whole:
            parts.append(f"{size} x {data.seq_len}: {wire:.3g} MB on the wire, {whole:.3g} MB with torch fields")
    if not parts:
        return None
    return f"Memory besides the plan and the mapped store, estimated, by batch: {'; '.join(parts)}."
