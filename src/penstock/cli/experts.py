"""The data of an expert manifest as stores that are prepared once.

In: `ExpertData` (files or hub names of splits, fields, template, the base model whose tokenizer is used). Out: a store
for each task. They lie in `--cache`, else where the manifest says (`pretokenized_cache`), else in `.stores` beside the
run folder, so that runs share them; a store's name ends in a digest of tokenizer, template, fields and inputs, and what
the input *holds* is compared by `prepare` itself: the same data isn't tokenised again, changed data is, and only what
changed. A store that is there is examined first, and made anew if it is damaged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.data import prepare_facts
from penstock.cli.output import note, one_line, progress_bar
from penstock.cli.templates import renderer_of
from penstock.errors import ConfigError, DamagedStoreError, NotAStoreError

if TYPE_CHECKING:
    from penstock.runlog import RunLog
    from penstock.sources import TemplateRenderer
    from penstock.tokenize import Tokenizer
    from penstock.train.adapters import Adaptation, ExpertData, TaskData

STORES_NAME = ".stores"
HELD_OUT_SPLIT = "train=90,val=10"
WITHOUT_TEMPLATE = "alpaca"
MOST_SHOWN = 60  # characters of a value


def record_adapted(adaptation: Adaptation | None, log: RunLog, *, verbose: bool) -> None:
    """What became of each key of somebody else's settings: into the log, and with `verbose` on the terminal."""
    if adaptation is None:
        return
    log.append("choice", name="settings_read_as", value=adaptation.kind, reason="by the shape of the file")
    for one in adaptation.adapted:
        log.append("adapted", key=one.key, value=one.value, outcome=one.outcome, detail=one.detail)
        if verbose:
            note(one_line(f"{one.key} = {_shortened(one.value)}: {one.outcome}: {one.detail}"))


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def prepared_stores(
    data: ExpertData, run_folder: Path, log: RunLog, *, cache: Path | None, network: bool
) -> dict[str, Path]:
    """A store for each task, by the task's name, prepared as far as it isn't yet.

    Raises:
        ConfigError: a path of the manifest leads nowhere, or to a file of another format.
        TokenizerError: the base model's tokenizer can't be used, or not with the template.
        InputError: the data can't be read.
    """
    from penstock.tokenize import load_tokenizer

    tokenizer = load_tokenizer(data.tokenizer, network=network)
    template, reason = _template(data, tokenizer)
    log.append("choice", name="prompt_template", value=template, reason=reason)
    renderer = renderer_of(
        template,
        field_map=data.field_map,
        loss="assistant",
        tokenizer=tokenizer,
        tokenizer_value=data.tokenizer,
        out=run_folder,
    )
    if renderer is None:
        raise ConfigError("a template is needed for records", hint="name one: prompt_template")
    root = cache or run_folder.parent / STORES_NAME
    stores = {}
    for task in data.tasks:
        words = _input_words(data, task)
        out = _store_path(data, task, root if cache or not data.cache else None, [words, tokenizer.digest, renderer])
        with log.phase(f"prepare {task.name}") as detail:
            detail.update(_prepare(words, out, tokenizer, renderer, network=network))
        _tell(task.name, out, detail, log)
        stores[task.name] = out
    return stores


def _template(data: ExpertData, tokenizer: Tokenizer) -> tuple[str, str]:
    from penstock.tokenize.chat import template_vocabulary, tokenizer_folder

    if data.template is not None:
        return data.template, "the manifest's prompt_template"
    if template_vocabulary(tokenizer, folder=tokenizer_folder(data.tokenizer)).chat_templates:
        return "tokenizer", "the manifest names none, and the base model has its own"
    return WITHOUT_TEMPLATE, "the manifest names none and the base model has none; this one needs no control tokens"


def _input_words(data: ExpertData, task: TaskData) -> list[str]:
    """What `prepare` reads, each input named after its split."""
    given = {"train": task.train, "val": task.valid, "test": task.test}
    return [f"{split}={_located(data, path)}" for split, path in given.items() if path is not None]


def _located(data: ExpertData, path: str) -> str:
    """A path where there is one, seen from the manifest; else, of a hub data set, its name. Decided by looking."""
    from penstock.sources.huggingface.words import SCHEME
    from penstock.sources.tables.files import table_format

    place = data.folder / Path(path).expanduser()
    if data.format == "huggingface":
        return str(place) if place.exists() else SCHEME + path.removeprefix(SCHEME)
    if not place.exists():
        raise ConfigError(
            f"the manifest's data {path!r} doesn't exist: no {str(place)!r}",
            hint="paths are seen from the manifest's folder; of a hub data set the format is huggingface",
        )
    found = table_format(os.fsencode(place))
    if place.is_file() and (found is None or found[0] != data.format):
        met = f"of format {found[0]}" if found else "no table by its ending"
        raise ConfigError(
            f"the manifest's data {path!r} is {met}, expected training.dataset.format {data.format!r}",
            hint="mend training.dataset.format (jsonl, csv, parquet, huggingface) or the file's name",
        )
    return str(place)


def _store_path(data: ExpertData, task: TaskData, root: Path | None, identity: list[Any]) -> Path:
    from penstock.hashing import digest_of

    if root is None:
        own = data.folder / Path(str(data.cache)).expanduser()
        return own if len(data.tasks) == 1 else own / task.name
    words, tokenizer_digest, renderer = identity
    key = digest_of([_absolute(words), tokenizer_digest, renderer.options()])
    name = data.name if len(data.tasks) == 1 else f"{data.name}-{task.name}"
    return root / f"{''.join(each if each.isalnum() or each in '-_' else '_' for each in name)}-{key[:12]}"


def _absolute(words: list[str]) -> list[str]:
    """Inputs by where they lie; names of the hub as they are."""
    parts = [word.partition("=")[::2] for word in words]
    return [f"{split}={Path(path).resolve() if Path(path).exists() else path}" for split, path in parts]


def _prepare(
    words: list[str], out: Path, tokenizer: Tokenizer, renderer: TemplateRenderer, *, network: bool
) -> dict[str, Any]:
    from penstock import fs
    from penstock.hardware import default_workers, probe
    from penstock.sources import InputOptions, closing_all, sources_from_inputs
    from penstock.store import PrepareOptions, prepare

    has_own_splits = len(words) > 1
    splits = ",".join(f"{word.partition('=')[0]}=1" for word in words)
    damaged = _is_damaged(out)
    options = PrepareOptions(
        split=splits if has_own_splits else HELD_OUT_SPLIT,
        split_by="source" if has_own_splits else "group",
        workers=default_workers(probe()),
        processes=True,
    )
    sources = sources_from_inputs(words, options=InputOptions(renderer=renderer, network=network))
    with closing_all(sources), progress_bar("preparing") as bar:
        if damaged:
            fs.remove_tree(out)  # it can be made again from its input, as a cache can
        facts = prepare_facts(prepare(sources, out, tokenizer=tokenizer, options=options, on_progress=bar))
    kept = ("documents", "tokens", "bytes", "units", "documents_reused", "committed", "digest", "skipped")
    return {"store": str(out), "was_damaged": damaged, **{name: facts[name] for name in kept}}


def _is_damaged(out: Path) -> bool:
    """Whether a store lies there that can't be trusted; nothing, or something else, is none."""
    from penstock.store import verify

    try:
        return bool(verify(out))
    except NotAStoreError:
        return False
    except DamagedStoreError:
        return True


def _tell(name: str, out: Path, detail: dict[str, Any], log: RunLog) -> None:
    amount = f"{detail['documents']:,} documents, {detail['tokens']:,} tokens"
    if detail["was_damaged"]:
        reason = "the store prepared before was damaged: made anew"
    elif detail["committed"]:
        reason = "prepared now; the next start uses it"
    else:
        reason = "prepared before and unchanged: nothing is tokenised again"
    log.append("choice", name=f"data {name}", value=str(out), reason=f"{reason} ({amount})")
    note(one_line(f"data {name}: {out}: {reason} ({amount})"))
