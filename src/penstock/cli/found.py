"""What `inspect` prints of a search and of a step: documents, and where in them.

In: the JSON objects of `inspect --find` and `inspect --step`. Out: lines on stdout; no name or text in them can drive
the terminal.
"""

from __future__ import annotations

from typing import Any

from penstock.cli.output import one_line, print_facts

__all__ = ["print_found", "print_step"]

MOST_FACTS = 160


def print_found(facts: dict[str, Any]) -> None:
    """The documents that hold a passage, each with its first places."""
    where = [f"{part['documents']:,} in {name}" for name, part in facts["splits"].items() if part["documents"]]
    where += [f"{count:,} excluded as {reason}" for reason, count in facts["excluded"].items()]
    searched = f"{facts['searched']:,} documents" + (f" of split {facts['split']}" if facts["split"] else "")
    if not facts["found"]:
        print(one_line(f"not found in {searched}: {facts['passage']}"))
        return
    times = "once" if facts["matches"] == 1 else f"{facts['matches']:,} times"
    total = f"{times} in {facts['found']:,} documents: {', '.join(where)}"
    print_facts({name: one_line(value) for name, value in {"searched": searched, "found": total}.items()})
    if not facts["exact"]:
        print("this vocabulary doesn't keep bytes: places are whole documents")
    for document in facts["shown"]:
        _print_document(document)
    if len(facts["shown"]) < facts["found"]:
        print(f"\nand {facts['found'] - len(facts['shown']):,} more documents; --most shows more")


def _print_document(document: dict[str, Any]) -> None:
    times = "once" if document["matches"] == 1 else f"{document['matches']:,} times"
    print()
    state = f"{document['split']}, {document['status']}, {times}"
    print(one_line(f"-- document {document['document']} {document['key']}  ({state})"))
    _print_source_facts(document["facts"])
    for place in document["places"]:
        exact = "" if place["exact"] else " (of the whole document)"
        told = [
            f"{document['file']}, bytes {place['byte_start']}-{place['byte_end']}{exact}",
            f"line {place['line']}",
            f"tokens {place['first_token']}-{place['last_token']}",
        ]
        told += [f"token {place['token']} of the data"] if place["token"] is not None else []
        told += [f"rows {_ranges(place['rows'])}"] if place.get("rows") else []
        print(one_line(f"  {', '.join(told)}"))
        print(one_line(f"    {place['context'].strip()}"))
    if len(document["places"]) < document["matches"]:
        print(f"  and {document['matches'] - len(document['places']):,} more places")


def _print_source_facts(facts: dict[str, Any]) -> None:
    if facts:
        names = sorted(facts, key=lambda name: name not in ("commit", "time"))  # the rest may be cut off
        told = one_line(", ".join(f"{name} {facts[name]}" for name in names))
        print(f"  {told if len(told) <= MOST_FACTS else told[:MOST_FACTS] + '...'}")


def _ranges(rows: list[int]) -> str:
    """Ascending numbers, runs of them as first-last."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def print_step(facts: dict[str, Any]) -> None:
    """The rows of a step, each with its documents."""
    last = facts["first_position"] + facts["batch_rows"] - 1
    state = "" if facts["is_done"] else ", which isn't recorded as done"
    stores = facts.get("stores", [facts])
    whole_pass = f", pass {facts['pass']}" if "pass" in facts else ""
    told = {
        "run": one_line(facts["run"]),
        "step": f"{facts['step']}{state}",
        **{
            one_line(f"store {one['name']}" if "name" in one else "store"): one_line(
                f"{one['store']} version {one['version']}, digest {one['digest']}"
            )
            for one in stores
        },
        "rows": f"{facts['batch_rows']} of {facts['seq_len']} tokens, split {one_line(facts['split'])}, "
        f"positions {facts['first_position']} to {last}{whole_pass}",
        "order": one_line(facts["order"]),
    }
    if facts["transforms"]:
        named = [f"{one['name']} {one['rate']:g}" for one in facts["transforms"]]
        told["changed by"] = one_line(f"{', '.join(named)}; places are those before")
    print_facts(told)
    for row in facts["rows"]:
        source = f"{row['source']}, pass {row['pass']}, " if "source" in row else ""
        figures = f"{source}row {row['row']}, {row['tokens']} tokens, {row['targets']} targets"
        print()
        print(one_line(f"-- position {row['position']}: {figures}"))
        for document in row["documents"]:
            exact = "" if document["exact"] else " (of the whole document)"
            place = f"places {document['row_start']}-{document['row_end']}"
            origin = f"bytes {document['byte_start']}-{document['byte_end']}{exact} of {document['file']}"
            print(one_line(f"  {place}: document {document['document']} {document['key']}, {origin}"))
            _print_source_facts(document["facts"])
