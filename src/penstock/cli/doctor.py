"""`doctor`: what this machine is, what would be chosen on it and why, and why a run's GPU was idle."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, one_line, print_facts, print_json, print_table
from penstock.errors import ConfigError, InputError

PACKAGES = (
    "gigatoken",
    "tokenizers",
    "numpy",
    "pyarrow",
    "torch",
    "jax",
    "transformers",
    "peft",
    "torchao",
    "bitsandbytes",
    "datasets",
    "ray",
    "tensorflow",
)
DEFAULT_VOCAB_SIZE = 50_257


def doctor(
    profile: Annotated[
        str | None, typer.Option(help="Answer for a named machine instead, e.g. gpu-24gb or 24GB.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Say where a run's time went, and what to change.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings to choose for (YAML or JSON).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting to choose for, e.g. model.preset=small; repeatable."
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Ids of the tokenizer to choose for.", min=1)] = DEFAULT_VOCAB_SIZE,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine is, what would be chosen on it, and why; or why a run's GPU was idle.

    \b
    Examples:
      penstock doctor
      penstock doctor --profile gpu-24gb --set model.preset=small --set seq_len=1024 --set batch_rows=64
      penstock doctor --run runs/one
    """
    if run is not None:
        if profile or config or settings:
            raise ConfigError("--run was given with settings or a profile", hint="ask for one of them at a time")
        _explain_run(run, json_output=json_output)
        return
    from penstock import hardware

    name = _profile_name(profile) if profile else None
    machine = hardware.profile(name) if name else hardware.probe()
    chosen = _training_choices(machine, config, settings or [], vocab_size=vocab_size)
    facts: dict[str, Any] = {
        "hardware": machine.as_dict(),
        "packages": _packages(),
        "choices": _choices(machine),
        "training": chosen,
    }
    if json_output:
        print_json(facts)
        return
    gpus = ", ".join(f"{gpu.name} ({human_bytes(gpu.memory_bytes)})" for gpu in machine.gpus)
    print_facts(
        {
            "processor": one_line(f"{machine.cpu_name}, {machine.cpu_cores} cores for this process"),
            "memory": human_bytes(machine.memory_bytes),
            "accelerator": one_line(gpus or f"none: {machine.gpu_note}"),
            "system": one_line(f"{machine.platform}, Python {machine.python}"),
        }
    )
    if name is None:
        print_table(
            [(package, version or "not installed") for package, version in facts["packages"].items()],
            header=("package", "version"),
        )
    for choice in facts["choices"]:
        print(one_line(f"{choice['name']}: {choice['value']} ({choice['reason']})"))
    _print_training(chosen)


def _profile_name(given: str) -> str:
    """The profile's name; a size alone (`24GB`, `24`) is the card of that size."""
    size = re.fullmatch(r"(\d+)\s*(?:gb)?", given.strip().lower())
    return f"gpu-{size[1]}gb" if size else given


def _training_choices(machine: Any, config: Path | None, settings: list[str], *, vocab_size: int) -> dict[str, Any]:
    """What the rules choose for a run with these settings. Measuring on the GPU may correct them when it starts."""
    from penstock.train.config import load_config
    from penstock.train.tuning import explain, profile_of

    loaded = load_config(config, settings)
    if loaded.model.pretrained is not None:
        raise ConfigError(
            "model.pretrained is set, whose sizes are known only when it is opened",
            hint="leave it out, and set model.preset or sizes like its own",
        )
    shape = loaded.model.shape(vocab_size=vocab_size, seq_len=loaded.seq_len)
    rows = explain(profile_of(machine, device=loaded.device), loaded, shape)
    wanted = f"{loaded.model.summary}, {loaded.batch_rows} rows of {loaded.seq_len} tokens, {vocab_size:,} ids"
    return {
        "for": wanted,
        "choices": [{"name": name, "value": value, "reason": reason} for name, value, reason in rows],
    }


def _print_training(chosen: dict[str, Any]) -> None:
    print(f"\nby rule, for {chosen['for']}:")
    names = [one["name"] for one in chosen["choices"]]
    values = [one["value"] for one in chosen["choices"]]
    for one in chosen["choices"]:
        name, value = one["name"].ljust(max(map(len, names))), one["value"].ljust(max(map(len, values)))
        print(one_line(f"  {name}  {value}  {one['reason']}"))


def _explain_run(run: Path, *, json_output: bool) -> None:
    from penstock.report import quantities
    from penstock.report.idleness import WORDS, idleness_of
    from penstock.report.run import read_run_records

    records = read_run_records(run)
    if not any(record.get("kind") == "step" for record in records):
        raise InputError(f"{run} has no step yet: there is no time to account for", hint="let it train for some steps")
    found = idleness_of(records)
    if json_output:
        print_json({"run": str(run), **found.as_dict()})
        return
    seconds = found.as_dict()["seconds"]
    shares = found.account.shares()
    rows = [(WORDS[name], f"{share:.1f} %", quantities.duration(seconds[name])) for name, share in shares.items()]
    print_table(rows, header=("where the time went", "share", "time"))
    for name, percent in found.activity.items():
        print(one_line(f"  {name.removesuffix('_percent').replace('_', ' ')}: {percent:.1f} % (mean of the samples)"))
    print()
    if not found.advice:
        print("nothing stands out: the time went to computing")
    for one in found.advice:
        share = f" ({one.percent:.1f} %)" if one.percent is not None else ""
        print(one_line(f"{one.cause}{share}: {one.change}"))


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _choices(machine: Any) -> list[dict[str, str]]:
    from penstock.hardware import default_workers

    workers = default_workers(machine)
    has_torch = importlib.util.find_spec("torch") is not None
    device = ("cuda", f"{machine.gpus[0].name} is there") if machine.gpus else ("cpu", machine.gpu_note or "no GPU")
    return [
        {"name": "prepare workers", "value": str(workers), "reason": "one worker per core of this process"},
        {"name": "training device", "value": device[0], "reason": device[1]},
        {
            "name": "training",
            "value": "possible" if has_torch else "not possible",
            "reason": "torch is installed" if has_torch else "pip install 'penstock[torch]'",
        },
    ]
