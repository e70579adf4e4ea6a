"""What `inspect` prints about a store as a whole: facts, tables, a histogram in text, a sample of documents.

In: the JSON object of `inspect`. Out: lines on stdout in which no name can drive the terminal or push a table apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.cli.output import human_bytes, one_line, print_facts, print_table

__all__ = ["hygiene_lines", "print_sample", "print_skipped", "print_splits", "print_summary"]

MOST_ROWS = 10
MOST_CONTROLS = 8
MOST_EXAMPLES = 2
NAME_WIDTH = 60
BAR_WIDTH = 32
NO_NAME = "none known"


def print_summary(facts: dict[str, Any]) -> None:
    """Everything about a version, the statistics of all of it or of one split."""
    statistics = facts["statistics"]
    _print_facts(facts)
    print_splits(facts)
    if statistics["split"] is not None:
        print(f"\nfrom here on, split {one_line(statistics['split'])} alone")
    if statistics["loss_tokens"] < statistics["tokens"]:
        share = 100 * statistics["loss_tokens"] / statistics["tokens"]
        print(f"\nloss on {statistics['loss_tokens']:,} of {statistics['tokens']:,} tokens ({share:.1f} %)")
    _print_lengths(statistics["lengths"])
    for kind, noun in (("sources", "source"), ("languages", "language"), ("folders", "folder")):
        _print_groups(statistics[kind], noun, total=statistics["tokens"])
    _print_longest(statistics["longest"])
    _print_left_out(statistics["left_out"])


def _print_facts(facts: dict[str, Any]) -> None:
    tokenizer = facts["tokenizer"]
    controls = list(tokenizer["control_tokens"])
    more = f" and {len(controls) - MOST_CONTROLS} more" if len(controls) > MOST_CONTROLS else ""
    ratio = f", {facts['bytes'] / facts['tokens']:.2f} bytes per token" if facts["tokens"] else ""
    lines = {
        "store": one_line(f"{facts['store']} version {facts['version']}, {facts['created']}"),
        "digest": facts["digest"],
        "documents": f"{facts['documents']:,} of {facts['found']:,} found",
        "tokens": f"{facts['tokens']:,} from {human_bytes(facts['bytes'])}{ratio}",
        "layout": f"{facts['segments']} segments of {facts['dtype']}",
        "tokenizer": one_line(
            f"{tokenizer['origin']}, {tokenizer['vocab_size']:,} ids, end token {tokenizer['end_id']}"
        ),
        "control tokens": one_line(f"{', '.join(controls[:MOST_CONTROLS])}{more} (never made from text)"),
        "added tokens kept": one_line(", ".join(tokenizer["kept_tokens"]) or "none"),
        "sources": one_line(", ".join(f"{source['name']} from {source['location']}" for source in facts["sources"])),
    }
    print_facts({**lines, **hygiene_lines(facts)})


def hygiene_lines(facts: dict[str, Any]) -> dict[str, str]:
    """What was taken out of the documents, where anything was, and which near copies went, if they were looked for."""
    lines = {}
    secrets = facts.get("secrets")
    if isinstance(secrets, dict) and secrets.get("documents"):
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in secrets["redacted"].items())
        lines["secrets"] = one_line(f"redacted in {secrets['documents']:,} documents: {kinds}")
    near = facts.get("near")
    if isinstance(near, dict):
        lines["near copies"] = one_line(
            f"{near['excluded']:,} excluded in {near['clusters']:,} clusters, the largest of {near['largest']:,}; "
            f"similarity from {near['threshold']:g} on"
        )
    else:  # said, so that nobody takes the promise about copies across splits for more than it is
        lines["near copies"] = "not looked for; --dedup near does"
    return lines


def print_splits(facts: dict[str, Any]) -> None:
    """The splits of a version, with the share each one got."""
    total = max(facts["tokens"], 1)
    rows = [
        (one_line(name), f"{part['documents']:,}", f"{part['tokens']:,}", f"{100 * part['tokens'] / total:.1f} %")
        for name, part in facts["splits"].items()
    ]
    print_table(rows, header=("split", "documents", "tokens", "achieved"))


def print_skipped(skipped: dict[str, int]) -> None:
    """How many documents were left out, by reason."""
    if skipped:
        rows = [(one_line(reason), f"{count:,}") for reason, count in skipped.items()]
        print_table(rows, header=("left out", "documents"))


def _print_lengths(lengths: dict[str, Any]) -> None:
    if not lengths["count"]:
        print("\nno documents, so no lengths")
        return
    shares = ", ".join(f"p{percent} {length:,}" for percent, length in lengths["percentiles"].items())
    print(f"\ntokens per document  {lengths['min']:,} to {lengths['max']:,}, mean {lengths['mean']:,.1f}; {shares}")
    most = max(one["documents"] for one in lengths["histogram"])
    rows = [
        (
            _span(one["shortest"], one["longest"]),
            f"{one['documents']:,}",
            f"{one['tokens']:,}",
            # Of full width, because all columns but the first are set flush right.
            ("#" * -(-BAR_WIDTH * one["documents"] // most)).ljust(BAR_WIDTH),
        )
        for one in lengths["histogram"]
    ]
    print_table(rows, header=("length", "documents", "tokens", ""))


def _span(shortest: int, longest: int) -> str:
    return f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"


def _print_groups(groups: dict[str, Any], noun: str, *, total: int) -> None:
    """The largest groups, and the rest as one; nothing where a table would only repeat the totals."""
    shown, rest = groups["largest"][:MOST_ROWS], groups["largest"][MOST_ROWS:]
    if len(shown) < 2:
        return
    entries = [(_short(group["name"]) or NO_NAME, group) for group in shown]
    rest = [*rest, *([groups["other"]] if groups["other"] else [])]
    if rest:
        sums = {name: sum(group[name] for group in rest) for name in ("documents", "tokens", "bytes")}
        entries.append((f"{groups['count'] - len(shown):,} others", sums))
    rows = [
        (
            name,
            f"{group['documents']:,}",
            f"{group['tokens']:,}",
            f"{100 * group['tokens'] / max(total, 1):.1f} %",
            f"{group['bytes'] / group['tokens']:.2f}" if group["tokens"] else "",
        )
        for name, group in entries
    ]
    print()
    print_table(rows, header=(noun, "documents", "tokens", "share", "bytes/token"))


def _print_longest(longest: Sequence[dict[str, Any]]) -> None:
    if longest:
        rows = [
            (_short(one["key"]), f"{one['tokens']:,}", one_line(one["split"]), str(one["document"])) for one in longest
        ]
        print()
        print_table(rows, header=("longest documents", "tokens", "split", "--doc"))


def _print_left_out(left_out: Sequence[dict[str, Any]]) -> None:
    if left_out:
        print()
        examples = [", ".join(_short(key) for key in one["examples"][:MOST_EXAMPLES]) for one in left_out]
        width = max(map(len, examples))
        rows = [
            (one_line(one["reason"]), f"{one['documents']:,}", shown.ljust(width))
            for one, shown in zip(left_out, examples, strict=True)
        ]
        print_table(rows, header=("left out", "documents", "such as".ljust(width)))


def print_sample(documents: Sequence[dict[str, Any]]) -> None:
    """Documents, each with its first lines."""
    for place, one in enumerate(documents):
        if place:
            print()
        facts = f"document {one['document']}, {one['split']}, {one['tokens']:,} tokens"
        print(f"-- {_short(one['key'])}  ({one_line(facts)})")
        for line in one["text"].expandtabs(4).split("\n"):
            print(f"  {one_line(line)}")
        if not one["is_whole"]:
            print("  ...")


def _short(name: str) -> str:
    """A name that leaves room for the numbers beside it: beginning and end, where it is long."""
    name = one_line(name)
    half = (NAME_WIDTH - 3) // 2
    return name if len(name) <= NAME_WIDTH else f"{name[:half]}...{name[-half:]}"
