"""`doctor`: what this machine is, what would be chosen on it, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, one_line, print_facts, print_json, print_table

PACKAGES = (
    "gigatoken",
    "tokenizers",
    "numpy",
    "pyarrow",
    "torch",
    "jax",
    "transformers",
    "datasets",
    "ray",
    "tensorflow",
)


def doctor(
    profile: Annotated[str | None, typer.Option(help="Answer for a named machine instead, e.g. gpu-24gb.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine is and what would be chosen on it.

    \b
    Examples:
      penstock doctor
      penstock doctor --profile gpu-24gb --json
    """
    from penstock import hardware

    machine = hardware.profile(profile) if profile else hardware.probe()
    facts: dict[str, Any] = {"hardware": machine.as_dict(), "packages": _packages(), "choices": _choices(machine)}
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
    print_table(
        [(name, version or "not installed") for name, version in facts["packages"].items()],
        header=("package", "version"),
    )
    for choice in facts["choices"]:
        print(one_line(f"{choice['name']}: {choice['value']} ({choice['reason']})"))


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
