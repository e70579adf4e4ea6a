"""The rules as the tables of docs/configuration.md: one for each kind of file, a line for each key."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.train.adapters import expert_rules, flags, training_config
from penstock.train.adapters.rules import Rule

__all__ = ["TABLES", "table"]

HEADER = "| key | takes effect as | not applicable because | refused because |\n|---|---|---|---|\n"

TABLES: dict[str, tuple[tuple[str, tuple[Rule, ...]], ...]] = {
    "expert manifests": (
        ("", expert_rules.ROOT),
        ("base_model.", expert_rules.BASE_MODEL),
        ("adapters[].", expert_rules.ADAPTER),
        ("training.", expert_rules.TRAINING),
        ("training.dataset.", expert_rules.DATASET),
        ("training.dataset.tasks.NAME.", expert_rules.TASK),
        ("training.config.", expert_rules.CONFIG),
    ),
    "training_config.yaml": tuple((f"{name}.", rules) for name, rules in training_config.SECTIONS.items()),
    "flags": (("", flags.RULES),),
}


def table(sections: tuple[tuple[str, tuple[Rule, ...]], ...]) -> str:
    """Markdown; keys of which the same is to be said share a line."""
    return HEADER + "".join(f"| {line} |\n" for prefix, rules in sections for line in _lines(prefix, rules))


def _lines(prefix: str, rules: tuple[Rule, ...]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for rule in rules:
        groups.setdefault((rule.effect, rule.idle, rule.refusal), []).append(f"`{prefix}{rule.name}`")
    for words, names in groups.items():
        yield " | ".join([", ".join(names), *(word.replace("|", "\\|") for word in words)])
