"""`prepare`: stores made."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import (
    human_bytes,
    human_count,
    note,
    one_line,
    print_facts,
    print_json,
    progress_bar,
)
from penstock.cli.store_summary import hygiene_lines, print_skipped, print_splits
from penstock.errors import ConfigError

# As in penstock.sources and penstock.tokenize, which `--help` doesn't load.
DEFAULT_UNIT_BYTES = 16 * 2**20
DEFAULT_VOCAB_SIZE = 8192

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Folder, file, git:PATH, hf:NAME, NAME=PATH, stdlib:")
    ],
    out: Annotated[Path, typer.Option("--out", help="The store; made if it isn't there, updated if it is.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="File (tokenizer.json, .tiktoken, .model), folder or hub id. Default: the store's, else trained."
        ),
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(help="Name of the token after each document; of a trained vocabulary, any.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Size of a trained vocabulary.", show_default=str(DEFAULT_VOCAB_SIZE))
    ] = None,
    split: Annotated[str, typer.Option(help="Names and shares, the most protected last.")] = "train=85,val=10,test=5",
    include: Annotated[
        list[str] | None, typer.Option(help="Only paths that match (as in .gitignore); repeatable.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No paths that match; repeatable.")] = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Take hidden files and folders too.")] = False,
    vendored: Annotated[
        bool, typer.Option("--vendored", help="Take node_modules, vendor, site-packages… too.")
    ] = False,
    max_file_bytes: Annotated[int, typer.Option(help="Larger files are left out.")] = 16 * 2**20,
    text_field: Annotated[str | None, typer.Option(help="Column of text in a table. Default: found by name.")] = None,
    id_field: Annotated[
        str | None, typer.Option(help="Column that names a row. Default: its place in the file.")
    ] = None,
    group_field: Annotated[
        str | None, typer.Option(help="Column by which rows stay in one split. Default: each row on its own.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Records through alpaca, chatml, llama, mistral, phi, deepseek, gemma, plain… or tokenizer."),
    ] = None,
    field_map: Annotated[
        list[str] | None, typer.Option(help="Field of a record = column, as in response=answer; repeatable.")
    ] = None,
    loss: Annotated[str, typer.Option(help="What is learnt of a record: assistant or all.")] = "assistant",
    git_parts: Annotated[str, typer.Option(help="Of a repository: commits, files or both.")] = "commits,files",
    git_content: Annotated[str, typer.Option(help="Of a commit: message, stats, diff.")] = "message,stats,diff",
    git_authors: Annotated[str, typer.Option(help="Names and addresses in commits: drop, hash or keep.")] = "drop",
    git_author_key: Annotated[str, typer.Option(help="Key of --git-authors hash.")] = "",
    git_max_diff_bytes: Annotated[int, typer.Option(help="Of a commit's diff, files beyond this are left out.")] = 2
    ** 20,
    git_since: Annotated[str | None, typer.Option(help="Only commits from this day on, as 2024-01-31.")] = None,
    git_max_commits: Annotated[int | None, typer.Option(help="Only the newest commits.")] = None,
    git_group: Annotated[
        str, typer.Option(help="What stays in one split: path, root, commit. auto: path for one repository, else root.")
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="A broken row ends the run instead of being counted.")
    ] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Allow downloads. Without it, no socket is opened.")
    ] = False,
    split_by: Annotated[
        str,
        typer.Option(help="group: by the hash of each document's group; time: the oldest first; source: by input."),
    ] = "group",
    split_at: Annotated[
        str | None, typer.Option(help="With --split-by time, when splits begin: val=2025-01-01,test=2025-07-01.")
    ] = None,
    time_field: Annotated[
        str, typer.Option(help="With --split-by time, the fact or column that is the time.")
    ] = "time",
    seed: Annotated[int, typer.Option(help="Seed of the splits.")] = 0,
    dedup: Annotated[
        str, typer.Option(help="exact, near (MinHash over tokens) or off. Copies across splits always go.")
    ] = "exact",
    near_threshold: Annotated[
        float, typer.Option(help="With --dedup near, the similarity from which documents are copies.")
    ] = 0.7,
    secrets: Annotated[
        str | None,
        typer.Option(
            help="Keys, tokens, passwords: redact, drop (the document) or keep. Default: redact in files, git."
        ),
    ] = None,
    minified: Annotated[bool, typer.Option("--minified", help="Take minified code too.")] = False,
    generated: Annotated[bool, typer.Option("--generated", help="Take generated code and lock files too.")] = False,
    min_bytes: Annotated[int, typer.Option(help="Shorter documents are left out.", min=0)] = 0,
    block: Annotated[
        list[str] | None,
        typer.Option(help="Never take documents whose key matches, or content:HEX; recorded; repeatable."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes (threads off Linux). Default: the cores.", min=1)
    ] = None,
    unit_bytes: Annotated[
        int, typer.Option(help="Input per unit of work; never changes the result.", min=1)
    ] = DEFAULT_UNIT_BYTES,
    reread: Annotated[bool, typer.Option("--reread", help="Read every input, even those that look unchanged.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: estimate documents, tokens and disk space from a sample.")
    ] = False,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Take over a lock left by another host.")] = False,
    json_output: Json = False,
) -> None:
    """Turn raw text and code into tokens in a store.

    \b
    Examples:
      penstock prepare stdlib: --out store
      penstock prepare ~/src/linux --out kernel --tokenizer gpt2/tokenizer.json --include '*.c' --include '*.h'
      penstock prepare docs=./docs code=./src --out mine --split train=90,val=10
      penstock prepare git:~/src/project#main --out history --git-parts commits
      penstock prepare chat.jsonl --out chat --tokenizer ./qwen --template tokenizer
      penstock prepare ~/src --out code --dedup near --secrets drop
      penstock prepare git:~/src/project --out history --split-by time
      penstock prepare train=a.jsonl val=b.jsonl --out mine --split-by source
      penstock prepare ~/src --out code --tokenizer gpt2 --dry-run

    Kill it at any time: the same command goes on where it was. Run it again after changes: only what changed is
    tokenised, and a new version is committed.
    """
    from penstock.cli.templates import renderer_of
    from penstock.hardware import default_workers, probe
    from penstock.sources import FileOptions, GitOptions, InputOptions, TableOptions, closing_all, sources_from_inputs
    from penstock.sources.hygiene import CleaningOptions
    from penstock.store import PrepareOptions, estimate_store
    from penstock.store import prepare as prepare_store
    from penstock.tokenize import load_tokenizer

    file_options = FileOptions(
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        max_file_bytes=max_file_bytes,
        hidden=hidden,
        vendored=vendored,
    )
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(out)) and not out.exists():
        raise ConfigError(
            f"--out {str(out)!r} looks like a URL, and a store is made on a local disk",
            hint="prepare into a folder, then: penstock push STORE URL",
        )
    if tokenizer and vocab_size is not None:
        raise ConfigError(
            f"--vocab-size {vocab_size} is of a vocabulary to be trained, and --tokenizer names one",
            hint="leave one of them out",
        )
    loaded = load_tokenizer(tokenizer, end_token=end_token, network=network) if tokenizer else None
    renderer = renderer_of(
        template,
        field_map=field_map or (),
        loss=loss,
        tokenizer=loaded,
        tokenizer_value=tokenizer,
        end_token=end_token,
        out=out,
    )
    git_options = GitOptions(
        parts=tuple(git_parts.split(",")),
        content=tuple(git_content.split(",")),
        authors=git_authors,
        author_key=git_author_key,
        max_diff_bytes=git_max_diff_bytes,
        since=git_since,
        max_commits=git_max_commits,
        group=_recorded_git_group(out) if git_group == "auto" else git_group,
    )
    input_options = InputOptions(
        files=file_options,
        git=git_options,
        tables=TableOptions(text_field=text_field, id_field=id_field, group_field=group_field, strict=strict),
        renderer=renderer,
        network=network,
    )
    sources = sources_from_inputs(inputs, options=input_options, on_note=note)
    options = PrepareOptions(
        split=split,
        split_by=split_by,
        split_at=split_at,
        time_field=time_field,
        dedup=dedup,
        near_threshold=near_threshold,
        seed=seed,
        cleaning=CleaningOptions(secrets=secrets, minified=minified, generated=generated, min_bytes=min_bytes),
        block=tuple(block or ()),
        reread=reread,
        workers=workers or default_workers(probe()),
        processes=True,
        unit_bytes=unit_bytes,
        vocab_size=DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size,
        end_token=end_token,
        break_lock=break_lock,
        control_tokens=renderer.control_tokens if renderer else (),
    )
    if dry_run:
        with closing_all(sources):
            _print_estimate(estimate_store(sources, out, tokenizer=loaded, options=options), json_output=json_output)
        return
    if vocab_size is not None:
        _tell_of_kept_vocabulary(out, vocab_size)
    with closing_all(sources), progress_bar("preparing") as bar:
        result = prepare_store(sources, out, tokenizer=loaded, options=options, on_progress=bar, on_note=note)
    facts = prepare_facts(result)
    if json_output:
        print_json(facts)
    else:
        print_prepared(facts)


def _tell_of_kept_vocabulary(out: Path, vocab_size: int) -> None:
    """Says that an existing store keeps its own. No error: the command that made it may be run again, and a small
    corpus trains fewer tokens than were asked for."""
    from penstock.store.reader import list_versions, read_manifest

    versions = list_versions(out)
    kept = read_manifest(out, versions[-1]).tokenizer["vocab_size"] if versions else vocab_size
    if kept != vocab_size:
        name = one_line(str(out))
        note(f"{name} keeps its tokenizer of {kept} ids; for --vocab-size {vocab_size} choose another --out")


def _recorded_git_group(out: Path) -> str:
    """How the store's latest version groups repositories; `auto` where it has none.

    What `auto` means depends on how many repositories there are, and one more must move no document to another split.
    """
    from penstock.store.reader import list_versions, read_manifest

    versions = list_versions(out)
    sources = read_manifest(out, versions[-1]).options.get("sources", []) if versions else []
    return next((source["group"] for source in sources if source.get("kind") == "git"), "auto")


def _print_estimate(estimate: Any, *, json_output: bool) -> None:
    facts = {**asdict(estimate), "fits": estimate.fits}
    if json_output:
        print_json(facts)
        return
    print_facts(
        {
            "input": human_bytes(facts["input_bytes"]),
            "documents": f"about {human_count(facts['documents'])}",
            "tokens": f"about {human_count(facts['tokens'])}",
            "store": f"about {human_bytes(facts['store_bytes'])}",
            "free": human_bytes(facts["free_bytes"]),
        }
    )
    note("nothing was written; the same command without --dry-run does it")
    if not estimate.fits:
        note("the store doesn't fit: free some space, or choose --out on another disk")


def prepare_facts(result: Any) -> dict[str, Any]:
    """A `PrepareResult` as the JSON object that others rely on."""
    counts = result.manifest.counts
    return {
        "store": str(result.store),
        "version": result.manifest.version,
        "committed": result.committed,
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "bytes": counts["bytes"],
        "found": counts["found"],
        "seconds": round(result.seconds, 3),
        "units": result.units,
        "units_taken_over": result.units_taken_over,
        "workers": result.workers,
        "documents_reused": result.documents_reused,
        "documents_repaired": result.documents_repaired,
        "digest": result.manifest.digest,
        **{name: counts[name] for name in ("secrets", "near") if name in counts},
        "splits": counts["splits"],
        "skipped": counts["skipped"],
        "tokenizer": {**result.manifest.tokenizer, **result.tokenizer_engine},
    }


def print_prepared(facts: dict[str, Any]) -> None:
    """The same for people."""
    rate = human_bytes(facts["bytes"] / max(facts["seconds"], 1e-9))
    state = f"version {facts['version']}" if facts["committed"] else f"version {facts['version']}, unchanged"
    units = "1 unit" if facts["units"] == 1 else f"{facts['units']} units"
    tokenizer = facts["tokenizer"]
    print_facts(
        {
            "store": f"{one_line(facts['store'])}  ({state})",
            "documents": f"{facts['documents']:,} of {facts['found']:,} found",
            "tokens": f"{facts['tokens']:,} from {human_bytes(facts['bytes'])}",
            "time": f"{facts['seconds']:.1f} s, {rate}/s, {units}, {facts['workers']}",
            "tokenizer": one_line(f"{tokenizer['origin']}, {tokenizer['vocab_size']:,} ids"),
            "engine": one_line(f"{tokenizer['engine']}: {tokenizer['reason']}"),
            "digest": facts["digest"],
            **hygiene_lines(facts),
        }
    )
    print_splits(facts)
    print_skipped(facts["skipped"])
    note(f"see it: penstock inspect {shlex.quote(one_line(facts['store']))}")
