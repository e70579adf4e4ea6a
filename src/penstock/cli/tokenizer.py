"""`tokenizer train`: a vocabulary from one's own text, as a tokenizer.json that others load too."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, note, one_line, print_facts, print_json
from penstock.errors import TokenizerError

DEFAULT_SAMPLE_BYTES = 64 * 2**20
END_TOKEN = "<|endoftext|>"  # noqa: S105  a vocabulary entry, not a password

app = typer.Typer(help="Train a vocabulary on text of your own.", no_args_is_help=True)


@app.callback()
def _tokenizer() -> None:
    """Train a vocabulary on text of your own."""


@app.command("train")
def train(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT…", help="As for `penstock prepare`.")],
    out: Annotated[Path, typer.Option(help="The tokenizer.json to write.")],
    vocab_size: Annotated[int, typer.Option(help="Ids in all, bytes and control tokens included.")] = 8192,
    end_token: Annotated[str, typer.Option(help="Name of the token after each document.")] = END_TOKEN,
    control: Annotated[
        list[str] | None, typer.Option(help="A further token that text can't reach, for templates; repeatable.")
    ] = None,
    sample_bytes: Annotated[int, typer.Option(help="Train on a sample of about so many bytes.", min=1)] = (
        DEFAULT_SAMPLE_BYTES
    ),
    network: Annotated[
        bool, typer.Option("--network", help="Allow downloads of INPUT. Without it, no socket is opened.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a byte-level BPE vocabulary on a sample of the input; the same input gives the same file.

    \b
    Examples:
      penstock tokenizer train ~/src/linux --vocab-size 32768 --out kernel.json
      penstock tokenizer train stdlib: --out tiny.json --control '<|user|>' --control '<|assistant|>'
      penstock prepare ~/src/linux --out store --tokenizer kernel.json
    """
    from penstock import fs
    from penstock.sources import InputOptions, sources_from_inputs

    _refuse_existing(out, force=force)
    sources = sources_from_inputs(inputs, options=InputOptions(network=network), on_note=note)
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.callback(source.close)
        facts, content = _trained(
            sources, vocab_size=vocab_size, end_token=end_token, controls=control or [], sample_bytes=sample_bytes
        )
    with fs.fail_as_disk_error(f"writing {out}"):
        fs.write_atomic(out, content)
    facts = {"tokenizer": str(out), **facts}
    if json_output:
        print_json(facts)
        return
    _print_trained(facts)


def _refuse_existing(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise TokenizerError(f"{str(out)!r} is a folder", hint=f"name a file, for instance {out / 'tokenizer.json'}")
    if not out.absolute().parent.is_dir():
        raise TokenizerError(f"the folder of {str(out)!r} doesn't exist", hint="create it, or choose another --out")
    if out.exists() and not force:
        raise TokenizerError(f"{str(out)!r} exists", hint="add --force to replace it, or choose another --out")


def _trained(
    sources: list[Any], *, vocab_size: int, end_token: str, controls: list[str], sample_bytes: int
) -> tuple[dict[str, Any], bytes]:
    """Facts about the new vocabulary, and its file."""
    from penstock.tokenize import train_tokenizer
    from penstock.tokenize.sampling import VocabularySample

    started = time.perf_counter()
    sample = VocabularySample(sources, sample_bytes=sample_bytes)
    read = {"documents": 0, "bytes": 0}

    def counted() -> Any:
        for text in sample.texts():
            read["documents"] += 1
            read["bytes"] += len(text)
            yield text

    tokenizer = train_tokenizer(
        counted(), vocab_size=vocab_size, control_tokens=controls, end_token=end_token, sample_bytes=sample_bytes
    )
    seconds = time.perf_counter() - started
    held_out = list(sample.held_out())
    held_out_bytes = sum(map(len, held_out))
    num_tokens = int(tokenizer.encode(held_out)[0].size) if held_out_bytes else 0
    facts = {
        "vocab_size": tokenizer.vocab_size,
        "digest": tokenizer.digest,
        "end_token": end_token,
        "control_tokens": tokenizer.spec.control_tokens,
        "trained_on": read,
        "held_out": {"documents": len(held_out), "bytes": held_out_bytes, "tokens": num_tokens},
        "bytes_per_token": round(held_out_bytes / num_tokens, 4) if num_tokens else None,
        "seconds": round(seconds, 3),
    }
    return facts, tokenizer.spec.source_json


def _print_trained(facts: dict[str, Any]) -> None:
    held_out, trained_on = facts["held_out"], facts["trained_on"]
    judged = (
        f"{facts['bytes_per_token']:.3f} on {held_out['documents']:,} documents held out,"
        f" {human_bytes(held_out['bytes'])}"
        if facts["bytes_per_token"] is not None
        else "unknown: too few documents to hold any out"
    )
    print_facts(
        {
            "tokenizer": one_line(facts["tokenizer"]),
            "vocabulary": f"{facts['vocab_size']:,} ids",
            "control tokens": one_line(", ".join(facts["control_tokens"])),
            "trained on": f"{trained_on['documents']:,} documents, {human_bytes(trained_on['bytes'])}",
            "bytes per token": judged,
            "time": f"{facts['seconds']:.1f} s",
            "digest": facts["digest"],
        }
    )
    from penstock.tokenize.specification import END_TOKEN_NAMES

    if facts["end_token"] not in END_TOKEN_NAMES:
        note(one_line(f"hint: prepare with it by --tokenizer {facts['tokenizer']} --end-token '{facts['end_token']}'"))
