"""Expert manifests: one base model, one adapter, a data set and a training config, in JSON.

Schema 1.0 has `base_model` and `adapters` at the root; schema 2.0 has `base_models`, each with `adapters`. Without
`schema_version` it is 1.0. In: the mapping. Out: `Adaptation`, with the data set as `ExpertData`. What the values are
checked against, and what becomes of each key, is in expert_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, nearest_first
from penstock.sources.records.forms import FIELDS
from penstock.train.adapters import expert_rules as rules
from penstock.train.adapters.adaptation import Adaptation, ExpertData, TaskData
from penstock.train.adapters.rules import OUTSIDE, Adapted, Ruled, apply_rules, nested

__all__ = ["adapt_expert", "is_expert"]

MARKS = ("base_model", "base_models", "schema_version", "soft_prompts")


def is_expert(settings: Mapping[str, Any]) -> bool:
    """Whether a mapping has the shape of a manifest: a base model, or a training with a data set or a config."""
    training = settings.get("training")
    return any(name in settings for name in MARKS) or (
        isinstance(training, dict) and ("dataset" in training or "config" in training)
    )


def adapt_expert(settings: Mapping[str, Any], *, where: str, folder: Path, pretrained: str | None) -> Adaptation:
    """A manifest as our settings.

    Args:
        settings: the manifest, comments taken off.
        where: its file, for messages.
        folder: where the manifest lies; its paths are seen from there.
        pretrained: the base model that the user asked for instead, or of several.

    Raises:
        ConfigError: the manifest isn't one, or asks for what isn't offered.
    """
    ruled = Ruled()
    root = apply_rules(settings, rules.ROOT, ruled, prefix="", where=where)
    schema = root.get("schema_version", "1.0")
    training = root.get("training")
    if training is None:
        raise ConfigError(f"{where} has no 'training', expected one with 'dataset' and 'config'", hint=_EXAMPLE)
    base, adapters = _base_model(root, schema, ruled, where=where, pretrained=pretrained)
    _adapter(adapters, ruled, where=where)
    parts = apply_rules(training, rules.TRAINING, ruled, prefix="training.", where=where)
    if "dataset" not in parts:
        raise ConfigError(f"{where} has no 'training.dataset', expected one with a 'path' or 'tasks'", hint=_EXAMPLE)
    config = apply_rules(parts.get("config", {}), rules.CONFIG, ruled, prefix="training.config.", where=where)
    if "packing" not in config:
        ruled.settings["pack"] = "best-fit"
        _assume(ruled, "training.config.packing", "pack='best-fit'")
    name = pretrained or base.located(folder)
    ruled.settings["model.pretrained"] = name
    _found(ruled, base.key, f"model.pretrained={name!r}")
    data = _data(parts["dataset"], ruled, where=where, folder=folder, base_model=name)
    ours = {key: value for key, value in ruled.settings.items() if not key.startswith(OUTSIDE)}
    return Adaptation(
        kind=f"expert manifest, schema {schema}",
        settings=nested(ours),
        adapted=ruled.settled(),
        data=data,
        resume=bool(ruled.settings.get("run.resume", False)),
        ours=ruled.ours(),
        prepare_keys=_prepare_keys(ruled),
    )


def _prepare_keys(ruled: Ruled) -> frozenset[str]:
    """Keys that say what to prepare and how, and nothing of the run."""
    return frozenset(
        one.key
        for one in ruled.adapted
        if all(ours.startswith("data.") for ours in ruled.given.get(one.key, {}))
        and (ruled.given.get(one.key) or one.key.startswith("training.dataset."))
    )


_EXAMPLE = "examples/experts has whole manifests"


@dataclass(frozen=True, kw_only=True)
class _Base:
    """The base model that a manifest names, and under which key."""

    name: str
    key: str
    where: str

    def located(self, folder: Path) -> str:
        """A folder where there is one, else the name as the hub's; decided by looking."""
        from penstock.tokenize.hub import is_hub_id

        for path in (folder / self.name, Path(self.name)):
            if path.is_dir():
                return str(path)
        if is_hub_id(self.name):
            return self.name
        raise ConfigError(
            f"{self.key} is {self.name!r} in {self.where}: no such folder, and no name that the hub could have",
            hint="mend it, or name another with --set model.pretrained=FOLDER",
        )


def _base_model(
    root: Mapping[str, Any], schema: str, ruled: Ruled, *, where: str, pretrained: str | None
) -> tuple[_Base, Sequence[dict[str, Any]]]:
    """The base model, and the adapters that go with it."""
    own, other = ("base_model", "base_models") if schema == "1.0" else ("base_models", "base_model")
    if other in root:
        version = "2.0" if schema == "1.0" else "1.0"
        raise ConfigError(
            f"{where} has {other!r}, which schema {schema} hasn't, expected {own!r}",
            hint=f'write "schema_version": "{version}", or {own!r}',
        )
    if schema == "1.0":
        model = root.get("base_model")
        model = {"name": model} if isinstance(model, str) else model
        if not isinstance(model, dict):
            raise ConfigError(f"{where} has no 'base_model', expected a mapping with a 'name'", hint=_EXAMPLE)
        section = apply_rules(model, rules.BASE_MODEL, ruled, prefix="base_model.", where=where)
        if "adapters" in section:
            raise ConfigError(
                f"{where} has 'base_model.adapters', which schema 1.0 hasn't, expected 'adapters' at the root",
                hint="move them, or write schema 2.0",
            )
        return _named(section, "base_model", where), root.get("adapters", [])
    if "adapters" in root:
        raise ConfigError(
            f"{where} has 'adapters' at the root, which schema 2.0 hasn't, expected them in each of 'base_models'",
            hint='move them, or write "schema_version": "1.0"',
        )
    number = _chosen(root.get("base_models") or [], where=where, pretrained=pretrained)
    prefix = f"base_models[{number}]"
    section = apply_rules(root["base_models"][number], rules.BASE_MODEL, ruled, prefix=f"{prefix}.", where=where)
    return _named(section, prefix, where), section.get("adapters", [])


def _named(section: Mapping[str, Any], prefix: str, where: str) -> _Base:
    key = "path" if "path" in section else "name"
    if key not in section:
        raise ConfigError(f"{where} has no '{prefix}.name', expected a folder or a hub id", hint=_EXAMPLE)
    return _Base(name=section[key], key=f"{prefix}.{key}", where=where)


def _chosen(models: Sequence[Mapping[str, Any]], *, where: str, pretrained: str | None) -> int:
    """Which of the base models; the only one, or the one asked for."""
    if not models:
        raise ConfigError(f"{where} has no 'base_models', expected at least one", hint=_EXAMPLE)
    names = [model.get("name", model.get("path")) for model in models]
    if pretrained in names:
        return names.index(pretrained)
    if len(models) > 1:
        raise ConfigError(
            f"{where} has {len(models)} base models, expected one for a run: {', '.join(map(repr, names))}",
            hint=f"choose one: --set model.pretrained={names[0]}",
        )
    return 0


def _adapter(adapters: Sequence[dict[str, Any]], ruled: Ruled, *, where: str) -> None:
    if len(adapters) > 1:
        raise ConfigError(
            f"{where} has {len(adapters)} adapters for one base model, expected one",
            hint="keep the one that is to be trained",
        )
    for adapter in adapters:
        apply_rules(adapter, rules.ADAPTER, ruled, prefix="adapters[0].", where=where)


def _data(dataset: Mapping[str, Any], ruled: Ruled, *, where: str, folder: Path, base_model: str) -> ExpertData:
    """What to prepare; of several tasks each with its weight, which goes to the run's settings."""
    section = apply_rules(dataset, rules.DATASET, ruled, prefix="training.dataset.", where=where)
    kind = section.get("type", "multi_task" if "tasks" in section else "single")
    wanted, unwanted = ("path", "tasks") if kind == "single" else ("tasks", "path")
    if unwanted in section or not section.get(wanted):
        met = f"'{unwanted}'" if unwanted in section else f"no '{wanted}'"
        raise ConfigError(
            f"training.dataset has {met} in {where}, expected '{wanted}' alone for type {kind!r}",
            hint=f"write {wanted}, or another type (single, multi_task)",
        )
    settings = ruled.settings
    name = str(settings.get("data.name", "expert"))
    tasks = (
        [
            TaskData(
                name=name, train=section["path"], valid=section.get("validation_path"), test=section.get("test_path")
            )
        ]
        if kind == "single"
        else _tasks(section["tasks"], ruled, where=where)
    )
    if len(tasks) > 1:
        settings["mix"] = [f"{task.name}={task.weight:g}" for task in tasks]
    return ExpertData(
        name=name,
        folder=folder,
        format=section.get("format", "jsonl"),
        tasks=tuple(tasks),
        field_map=_field_map(section.get("field_mapping", {}), where=where),
        template=settings.get("data.template"),
        cache=settings.get("data.cache"),
        tokenizer=base_model,
    )


def _tasks(tasks: Mapping[str, Any], ruled: Ruled, *, where: str) -> list[TaskData]:
    found = []
    for name, task in tasks.items():
        if not isinstance(task, dict) or not name.replace("-", "_").isidentifier():
            raise ConfigError(
                f"training.dataset.tasks has {name!r}: {task!r:.80} in {where}, expected a name with 'train' and so on",
                hint="names of tasks are letters, digits, - and _",
            )
        prefix = f"training.dataset.tasks.{name}."
        section = apply_rules(task, rules.TASK, ruled, prefix=prefix, where=where)
        if "train" not in section:
            raise ConfigError(f"{where} has no '{prefix}train', expected a path", hint=_EXAMPLE)
        weight = section.get("weight", 1.0)
        if weight == 0:
            raise ConfigError(f"{prefix}weight is 0 in {where}, expected more", hint="leave the task out instead")
        found.append(
            TaskData(
                name=name,
                train=section["train"],
                valid=section.get("valid"),
                test=section.get("test"),
                weight=weight,
            )
        )
    return found


def _field_map(mapping: Mapping[str, Any], *, where: str) -> tuple[str, ...]:
    words = []
    for name, column in mapping.items():
        if name not in FIELDS:
            raise ConfigError(
                f"training.dataset.field_mapping has {name!r} in {where}, which is no field of a record",
                hint=f"known fields: {nearest_first(name, FIELDS)}",
            )
        if not isinstance(column, str) or not column:
            raise ConfigError(
                f"training.dataset.field_mapping.{name} is {column!r} in {where}, expected the name of a column",
                hint=f"for instance {name}: question",
            )
        if name != column:
            words.append(f"{name}={column}")
    return tuple(words)


def _assume(ruled: Ruled, key: str, detail: str) -> None:
    ruled.adapted.append(Adapted(key=key, value=None, outcome="takes effect", detail=f"absent: {detail}"))


def _found(ruled: Ruled, key: str, detail: str) -> None:
    """Says of a key what only looking could tell."""
    for number, one in enumerate(ruled.adapted):
        if one.key == key:
            ruled.adapted[number] = Adapted(key=key, value=one.value, outcome="takes effect", detail=detail)
