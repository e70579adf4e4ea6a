"""Results as text: a table for the terminal, the page docs/benchmarks.md, and the short table of the README.

In: result objects, as `run_benchmark` returns them or as their files hold them. Out: strings. Every number on the pages
comes from a result file; what isn't reached is said in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["machine_line", "page", "short_table", "table_line", "terminal_table", "with_short_table"]

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"

Result = Mapping[str, Any]

_TITLES = {
    "prepare": "Raw files to a committed store",
    "prepare-kernel": "Raw files to a committed store, sources of a kernel",
    "formats": "Tables and git history to a committed store",
    "load": "Shuffled batches from a store",
    "verify": "A store checked",
    "tokenize": "Documents in memory to ids",
    "refused": "Tokenizers that gigatoken refuses",
    "hygiene": "Hygiene of content",
    "near": "Near copies",
    "train": "Training steps",
    "train-gpu-124m": "Training on a GPU, 124M",
    "train-gpu-350m": "Training on a GPU, 350M",
    "train-gpu-1b": "Training on a GPU, 1.1B",
    "train-gpu-lora": "LoRA on a GPU, 1B-class",
    "train-gpu-start": "Command to first step on a GPU",
    "train-gpu-resume": "Deterministic resume on a GPU",
    "import": "Importing the package",
}

_NOTES = {
    "prepare": """Ours counts from opening the tokenizer file to the commit: self-check, walk, reading, encoding,
checksums, fsync and index. The ceiling is the encoder alone, documents in memory, ids thrown away, same threads; the
fastest of its three rows counts. datasets and datatrove get an even sample of the same documents, datasets in
memory, datatrove as JSONL, and pack nothing. Forty lines around gigatoken (`bench/bare_pipeline.py`) are the least that
a user would write: nothing is checked, hashed, searched or written down. Threads are encoder threads: where they are
fewer than the cores, reading and writing have a core of their own; else all share all of them
(adr/0013-beside-the-encoder-alone.md).""",
    "prepare-kernel": """`bench prepare` on the unpacked sources of a kernel (Debian's linux-source), two and a half
times as much text as the packages installed here: what a run spends before its first document and after its last
weighs less.""",
    "formats": """Same counting as above; megabytes are of the text itself, without the escapes of its format.""",
    "load": """Wire batches are what travels to a device: tokens in store width, loss mask, document borders. The first
pass of a process checks every block of the store. Everybody gives the same concat rows of T + 1 tokens (only our
best-fit row has others), shuffled; a row counts as T. Peers give int64 tokens and nothing else; for the rows "torch
int64 tokens, labels and positions" theirs are completed in plain numpy or PyTorch, as their users would do it, from
the end tokens. Where there is a GPU, batches count when they are on it. The first batch of a pass isn't in its rate.
Promises are judged on our loader as users get it, filled ahead by a thread, at the first batch size, against the
fastest row of any peer. Neighbours: two rows beside each other in the store; 1/3 of a pass apart where the order is
random. Memory is what the process holds beyond the plan, without the store's mapped pages. More in docs/loading.md.""",
    "verify": """All that `penstock verify` does, on one core: checksums of every file, each document's tokens hashed,
the digest computed again, leaks. Rates are of tokens as stored.""",
    "tokenize": """One pass over the documents by a tokenizer that has not met them. tokenizers gets an even sample.""",
    "refused": """Ours is prepare, from files to a committed store, as above. datasets gets the same documents in
memory and as many processes; the promise is judged against its `map` alone. The vocabularies are trained on the corpus
for this run.""",
    "hygiene": """One core, processor time, documents in memory. The ceiling is a search for a NUL byte. Secrets are
made up, in known formats, planted in ordinary files; whatever is found in the corpus counts as a false alarm.""",
    "near": """One core, processor time. Signatures are made of ids in memory; rensa makes them of the same hashes. Who
stays is timed on made-up signatures. A copy is found when it and its original are at or above the recorded threshold;
copies whose exact similarity lies within 0.04 of it may fall on either side.""",
    "train": """Ours is `penstock train` without a tuning flag. The plain loop and Hugging Face's Trainer train the same
architecture as it is exported, with the same padded vocabulary, rows and tokens. Ceilings: our loop on one batch that
is never loaded, and one large product. The model is tiny and the machine a CPU: this proves the code, and nothing is
promised of it.""",
    "train-gpu-124m": """Ours is `penstock train` without a tuning flag, told that the run is long. Trainer tuned by
hand: bf16, TF32, compile, fused AdamW, our batch, 8 workers. All train the same exported architecture, padded
vocabulary, rows and tokens; the peers don't keep documents apart. MFU is 6N + 12 L d T over the card's dense bf16
peak.""",
    "train-gpu-1b": """Float8 is opt-in (`model.float8`); its last training loss is compared with bf16's after the same
steps.""",
    "train-gpu-lora": """A model of transformers with the sizes of Llama 3.2 1B, our vocabulary and weights that were
drawn; rank 16 on every linear layer but the head. The promise is judged against Trainer + peft's faster row.""",
    "import": """Time of a whole process, starting Python included. Less is better.""",
}

_PREFACE = """# Benchmarks

Rendered from `benchmarks/results/*.json` by `benchmarks/run_all.py`; do not edit. Each figure is the median of repeats
that took turns with its ceiling and its peers, each in a fresh process, in one run on one machine. Ratios carry over to
other machines better than rates do."""


def terminal_table(result: Result) -> str:
    """Rows and ratios in columns."""
    rows = [(row["name"], _value(row), row["unit"], row["role"]) for row in result["results"]]
    lines = [f"bench {result['benchmark']}: {machine_line(result)}", ""]
    lines += _columns(rows)
    if result["ratios"]:
        lines += ["", *_columns([(each["name"], _ratio_value(each), _verdict(each)) for each in result["ratios"]])]
    if result.get("advice"):
        lines += ["", *result["advice"]]
    return "\n".join(lines)


def page(results: Sequence[Result]) -> str:
    """docs/benchmarks.md, whole."""
    lines = [_PREFACE]
    if not results:
        lines += ["", "No results yet: run `make bench`."]
    else:
        lines += ["", "## All that is promised", "", *_promise_lines(_promises(results))]
    for result in results:
        lines += ["", *_section(result)]
    return "\n".join(lines) + "\n"


def short_table(results: Sequence[Result]) -> str:
    """What a newcomer asks: how ours stands beside its peers, and what isn't reached; the rest in a number."""
    promised = _promises(results)
    told = [(result, each) for result, each in promised if _is_beside_a_peer(result, each) or each["met"] is not True]
    lines = _promise_lines(told)
    if promised:
        reached = sum(each["met"] is True for _, each in promised)
        dates = sorted({result["created"][:10] for result in results})
        told_of = f"Of {len(promised)} promised figures {reached} are reached; all of them: docs/benchmarks.md."
        machines = dict.fromkeys(machine_line(result) for result in results)
        lines += ["", told_of, f"Measured on {'; on '.join(machines)}. {', '.join(dates)}."]
    return "\n".join(lines)


def _promises(results: Sequence[Result]) -> list[tuple[Result, Mapping[str, Any]]]:
    """Each ratio that something was promised of, with its result."""
    return [(result, each) for result in results for each in result["ratios"] if each["required"] is not None]


def _is_beside_a_peer(result: Result, each: Mapping[str, Any]) -> bool:
    return any(row["name"] == each["over"] and row["role"] == "peer" for row in result["results"])


def _promise_lines(promises: Sequence[tuple[Result, Mapping[str, Any]]]) -> list[str]:
    """A table of promises and what was measured."""
    lines = ["| | measured | ratio | promised | |", "|---|---|--:|--:|---|"]
    for result, each in promises:
        promised = f"{each['bound']} {each['required']:g}"
        lines.append(table_line(_title(result), _comparison(each), _ratio_value(each), promised, _word(each)))
    return lines


def with_short_table(text: str, results: Sequence[Result]) -> str:
    """A README with the table between its markers; unchanged where it has none, or where there are no results."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or not results:
        return text
    return f"{before}{START}\n{short_table(results)}\n{END}{after}"


def _section(result: Result) -> list[str]:
    name = result["benchmark"]
    settings = "; ".join(f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in result["settings"].items())
    lines = [f"## {_title(result)} (`bench {name}`)", "", _NOTES.get(name, ""), ""]
    lines += ["| | value | lowest to highest | unit | |", "|---|--:|--:|---|---|"]
    for row in result["results"]:
        lines.append(table_line(row["name"], _value(row), _spread(row), row["unit"], row["role"]))
    for row in result["results"]:
        if "phases" in row:
            phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in row["phases"].items())
            lines += ["", f"Phases of {row['name']}: {phases}."]
    if result["ratios"]:
        lines += ["", "| ratio | value | promised | |", "|---|--:|--:|---|"]
        for each in result["ratios"]:
            promised = "-" if each["required"] is None else f"{each['bound']} {each['required']:g}"
            lines.append(table_line(f"{each['name']}: {_comparison(each)}", _ratio_value(each), promised, _word(each)))
    if result.get("advice"):
        lines += ["", *(f"- {line}" for line in result["advice"])]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return [
        *lines,
        "",
        f"{result['created'][:10]}, {machine_line(result)}. `{result['command']}`",
        f"Settings: {settings}.",
        f"Versions: {versions}.",
    ]


def _title(result: Result) -> str:
    name: str = result["benchmark"]
    return _TITLES.get(name, name)


def table_line(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(row: Result) -> str:
    return f"skipped: {row['skipped']}" if row.get("skipped") else _number(row["value"])


def _spread(row: Result) -> str:
    values = row.get("values") or []
    return f"{_number(min(values))} to {_number(max(values))}" if len(values) > 1 else ""


def _number(value: float | None) -> str:
    """Three digits that matter, no more: repeats differ in the second."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def _ratio_value(each: Result) -> str:
    return _number(each["value"])


def _comparison(each: Result) -> str:
    return f"{each['of']} / {each['over']}"


def _verdict(each: Result) -> str:
    if each["required"] is None:
        return _comparison(each)
    return f"{_word(each)} ({each['bound']} {each['required']:g}): {_comparison(each)}"


def _word(each: Result) -> str:
    if each["value"] is None:
        return "not measured"
    return {True: "reached", False: "NOT reached", None: ""}[each["met"]]


def machine_line(result: Result) -> str:
    """The machine of a result, in words."""
    machine = result["machine"]
    gpus = f", {', '.join(machine['gpus'])}" if machine.get("gpus") else ""
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}, {machine['platform']}{gpus}"


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns, but numbers (the second) to the right; the last isn't padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column == 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
