"""The parts of the page.

In: a `Run`. Out: one `section` each, or nothing where the records hold nothing to show. Long lists and texts are cut to
what a reader looks at, and say how much was cut: a page of any run stays below about a megabyte. Cost: linear in what
is shown.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from penstock.report import measures, quantities
from penstock.report.charts import bar, chart_figure
from penstock.report.contents import data_content, row_content, sample_content
from penstock.report.curves import loss_chart, small_charts
from penstock.report.fields import finite, flattened
from penstock.report.markup import Markup, clipped, joined, tag
from penstock.report.run import Evaluation, Run
from penstock.report.summary import phase_rates, plural
from penstock.report.tables import (
    ABSENT,
    MOST_TABLE_ROWS,
    NOTHING,
    NUMBER,
    count_text,
    fact_list,
    line,
    number_text,
    table,
    value_text,
    words,
)

__all__ = ["figure", "key_figures", "sections"]

MOST_DETAILS = 6
MOST_COMMAND_CHARACTERS = 4000


def key_figures(run: Run) -> Markup:
    """The half dozen numbers to know about a run."""
    change = measures.loss_change(run)
    timing = measures.timing(run)
    validations = measures.validations(run)
    last = validations[-1] if validations else None
    figures = []
    if change:
        small = f"from {quantities.decimal(change[0])}, {plural(measures.steps_done(run), 'step')}"
        figures.append(figure("Training loss", quantities.decimal(change[1]), small))
    if last and last.bits_per_byte is not None:
        small = f"bits per byte, loss {quantities.decimal(last.loss)}" if last.loss is not None else "bits per byte"
        figures.append(figure(f"Held out: {last.split}", quantities.decimal(last.bits_per_byte), small))
    if (rate := timing["tokens_per_second"]) is not None:
        stall = timing["data_stall_percent"]
        small = f"tokens/s, {quantities.percent(stall)} data stall" if stall is not None else "tokens/s"
        figures.append(figure("Speed", quantities.compact(rate), small))
    if run.steps and (tokens := measures.tokens_trained(run)):
        small = f"tokens in {plural(measures.steps_done(run), 'step')}"
        figures.append(figure("Trained on", quantities.compact(tokens), small))
    if counts := measures.stored(run):
        documents, tokens = counts
        several = f" in {plural(len(run.stores), 'store')}" if len(run.stores) > 1 else ""
        name = "Stores" if several else "Store"
        figures.append(figure(name, quantities.compact(tokens), f"tokens, {documents:,} documents{several}"))
    if run.started is not None:
        figures.append(figure("Time", quantities.duration(run.seconds), _starts_text(run)))
    return tag("dl", *figures, class_="figures") if figures else NOTHING


def figure(name: str, value: str, small: str) -> Markup:
    """A number to know, with its name and a remark."""
    return tag("div", tag("dt", name), tag("dd", tag("b", value), " ", tag("small", small)))


def _starts_text(run: Run) -> str:
    return (
        f"in {run.num_starts} starts"
        if run.num_starts > 1
        else "from start to end"
        if run.has_ended
        else "to the last record"
    )


def sections(run: Run) -> list[tuple[str, Markup]]:
    """(title, content) of every part that has something to show, in reading order."""
    parts = [
        ("Training", _training(run)),
        ("Time", _phases(run)),
        ("Data", data_content(run)),
        ("Rows the model saw", row_content(run)),
        ("What the model writes", sample_content(run)),
        ("Choices", _choices(run)),
        ("Hardware", _hardware(run)),
        ("Checkpoints", _checkpoints(run)),
        ("Events", _events(run)),
        ("Do it again", _reproduction(run)),
    ]
    return [(title, content) for title, content in parts if content]


def _training(run: Run) -> Markup:
    if not run.steps and not run.evaluations:
        return NOTHING
    small = [chart_figure(chart) for chart in small_charts(run)]
    parts = [chart_figure(loss_chart(run)), tag("div", *small, class_="pair")]
    if run.evaluations:
        header = [("Step", NUMBER), ("Split", ""), ("Loss", NUMBER), ("Bits per byte", NUMBER), ("Tokens", NUMBER)]
        rows = [
            (
                f"{one.step:,}",
                _split_text(one),
                *map(number_text, (one.loss, one.bits_per_byte)),
                count_text(one.tokens),
            )
            for one in reversed(run.evaluations)
        ]
        all_of_them = table("Newest first", header, rows)
        parts.append(tag("details", tag("summary", f"All {plural(len(rows), 'evaluation')}"), all_of_them))
    passes = measures.epoch_summaries(run)
    if passes:
        parts.append(tag("details", tag("summary", plural(len(passes), "pass", "passes")), _passes(passes)))
    return joined(parts)


def _split_text(one: Evaluation) -> str:
    return line(one.split if one.store is None else f"{one.split} of {one.store}")


def _passes(passes: list[dict[str, Any]]) -> Markup:
    names = ("Pass", "Last step", "Mean loss", "Held-out loss", "Tokens", "Tokens/s", "Learning rate")
    rows = [
        (
            f"{one['epoch']:,}{'' if one['complete'] else ' (part)'}",
            count_text(one["last_step"]),
            *map(number_text, (one["mean_train_loss"], one["val_loss"])),
            *map(count_text, (one["tokens"], one["tokens_per_second"])),
            ABSENT if one["learning_rate"] is None else quantities.scientific(one["learning_rate"]),
        )
        for one in reversed(passes)
    ]
    return table("Newest first", [(name, NUMBER) for name in names], rows)


def _phases(run: Run) -> Markup:
    longest = max((phase.seconds or 0 for phase in run.phases), default=0)
    items = []
    for phase in islice(run.phases, MOST_TABLE_ROWS):
        failed = phase.status != "ok"
        name = tag(
            "b", line(phase.name), *([" ", tag("span", line(phase.status), class_="pill failed")] if failed else [])
        )
        seconds = tag(
            "span", quantities.duration(phase.seconds) if phase.seconds is not None else "?", class_="seconds"
        )
        share = (phase.seconds or 0) / longest if longest else 0
        notes = [phase_rates(phase, run), *_detail_texts(phase.detail)]
        note = tag("small", " · ".join(note for note in notes if note))
        items.append(tag("li", name, seconds, bar(share, tone="failed" if failed else "train"), note))
    return tag("ol", *items, class_="phases") if items else NOTHING


def _detail_texts(detail: dict[str, Any]) -> list[str]:
    leaves = [(name, value) for name, value in flattened(detail) if value not in (None, "")]
    return [line(_detail_text(name, value)) for name, value in islice(leaves, MOST_DETAILS)]


def _detail_text(name: str, value: Any) -> str:
    if finite(value) is None:
        return f"{words(name)}: {value_text(name, value)}"
    return value_text(name, value) if name == "bytes" else f"{value_text(name, value)} {words(name)}"


def _choices(run: Run) -> Markup:
    rows = [(line(choice.name), value_text(choice.name, choice.value), line(choice.reason)) for choice in run.choices]
    header = [("Choice", ""), ("Value", "value"), ("Why", "reason")]
    return (
        tag("div", table("Every setting chosen, and the reason", header, rows), class_="stacked") if rows else NOTHING
    )


def _hardware(run: Run) -> Markup:
    facts = [(words(name), value_text(name, value)) for name, value in flattened(run.hardware)]
    if run.hardware_samples:
        measured = measures.hardware_summary(run)
        for name in ("peak_memory_mb", "peak_gpu_memory_mb"):
            if measured[name] is not None:
                size = quantities.bytes_text(measured[name] * measures.BYTES_PER_MB)
                facts.append((words(name.removesuffix("_mb")), size))
        if measured["mean_cpu_percent"] is not None:
            facts.append(("processor busy", quantities.percent(measured["mean_cpu_percent"])))
        for name, value in measured.items():
            if name.startswith("mean_gpu_"):
                facts.append((words(name.removeprefix("mean_")), value_text(name, value)))
        facts.append(("sampled", f"{measured['samples']:,} times"))
    return fact_list(facts)


def _checkpoints(run: Run) -> Markup:
    rows = [
        (
            f"{one.step:,}",
            tag("code", line(one.path)),
            quantities.bytes_text(one.num_bytes) if one.num_bytes is not None else ABSENT,
            quantities.duration(one.seconds) if one.seconds is not None else ABSENT,
        )
        for one in reversed(run.checkpoints)
    ]
    header = [("Step", NUMBER), ("Path", ""), ("Size", NUMBER), ("Written in", NUMBER)]
    return table("Newest first", header, rows) if rows else NOTHING


def _clock(time: float | None) -> str:
    return quantities.moment(time).replace("T", " ").removesuffix("+00:00") if time is not None else ""


def _events(run: Run) -> Markup:
    rows = [(_clock(time), line(message)) for time, message in run.events]
    return table("What happened on the way", [("Time (UTC)", "time"), ("Event", "")], rows) if rows else NOTHING


def _reproduction(run: Run) -> Markup:
    versions = [("penstock", run.version), ("Python", run.python), ("Platform", run.platform)]
    if run.started is not None:
        versions.append(("Started (UTC)", _clock(run.started)))
    command = tag("pre", clipped(run.command, most_characters=MOST_COMMAND_CHARACTERS)) if run.command else NOTHING
    return joined([part for part in (command, fact_list(versions)) if part])
