"""`train`, `run`, `report`: everything about run folders.

RUN/records.jsonl · RUN/config.json · RUN/manifest.json · RUN/report.html · RUN/checkpoints/ · RUN/store/ (of `run`)
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import __version__
from penstock.cli.data import prepare_facts
from penstock.cli.experts import prepared_stores, record_adapted
from penstock.cli.live import shown_records
from penstock.cli.output import note, one_line, print_json, progress_bar
from penstock.errors import RESUME, RUN_AGAIN, ConfigError, InputError, PenstockError

if TYPE_CHECKING:
    from penstock.pack import Plan
    from penstock.runlog import RunLog
    from penstock.store import Store
    from penstock.train import TrainConfig, TrainResult
    from penstock.train.adapters import Adaptation

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. steps=500; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the run's manifest as one JSON object.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Print what became of each key of a foreign config; of `run`, every choice too."
    ),
]

SAMPLE_ROWS = 4
INTERRUPTED_EXIT = 130


def train(
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run folder.")],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="Settings, or an expert manifest; see docs/configuration.md."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="STORE[@VERSION]", help="The store to train on; repeatable. A manifest names its own."
        ),
    ] = None,
    settings: Settings = None,
    mix: Annotated[
        list[str] | None,
        typer.Option("--mix", metavar="NAME=WEIGHT", help="Weight of a store or of paths, e.g. src/**=3; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-identical reruns on a GPU too; slower.")
    ] = False,
    network: Annotated[bool, typer.Option("--network", help="Allow downloads of models and data sets.")] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Where a manifest's data is kept prepared. Default: .stores beside RUN.")
    ] = None,
    verbose: Verbose = False,
    json_output: Json = False,
) -> None:
    """Train a model on a store, or an expert as its manifest says.

    \b
    Examples:
      penstock train --data store --out runs/one
      penstock train config.yaml --data store --out runs/two --set steps=1000 --set model.preset=small
      penstock train --data store --out runs/one --resume
      penstock train --data code --data books --mix books=0.3 --mix 'code:docs/**=2' --out runs/mixed
      penstock train experts/sql/manifest.json --out runs/sql
      torchrun --standalone --nproc-per-node 8 -m penstock train --data store --out runs/eight
    """
    from penstock.pack.mixture import names_of_stores, with_names
    from penstock.train.config import load_adapted

    wait_briefly()
    names = names_of_stores(data) if data else {}
    chosen = [*(settings or []), *(["deterministic=true"] if deterministic else [])]
    if network:
        chosen.append("network=true")
    if mix:
        chosen.append(f"mix={json.dumps(with_names(mix, names) if names else list(mix))}")
    loaded, adaptation = load_adapted(config, chosen)
    if not names and (adaptation is None or adaptation.data is None):
        raise ConfigError(
            "no --data was given, and the config names no data set",
            hint="make a store with `penstock prepare INPUT --out STORE`, then: penstock train --data STORE --out RUN",
        )
    resume = resume or (adaptation is not None and adaptation.resume)
    if resume:
        loaded = loaded.with_mix_of(out)
    if not names:
        _refuse_ranks("preparing a manifest's data", hint="prepare it with `penstock prepare`, and give it with --data")
    with ExitStack() as stack:
        if names:
            stores = _all_opened(names, out, stack, resume=resume)
            log = stack.enter_context(_recorded(out, loaded, again=RESUME))
            record_adapted(adaptation.with_prepared_store() if adaptation else None, log, verbose=verbose)
        else:
            log = stack.enter_context(_recorded(out, loaded, again=RESUME))
            stores = _expert_stores(loaded, adaptation, out, log, stack, resume=resume, cache=cache, verbose=verbose)
        first = next(iter(stores.values()))
        result = _train(loaded, first, out, log, resume=resume, mixed_with=stores, shows_choices=not json_output)
    _finish(out, result, json_output=json_output)


def run(
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="[INPUT...]", help="What to train on. Default: stdlib:")
    ] = None,
    repo: Annotated[
        Path | None, typer.Option(help="A git repository: its history and its files, as INPUT git:PATH.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Training settings (YAML or JSON).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="The run folder. Default: runs/DATE-TIME.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="As in `penstock prepare`. Default: trained on the input.")
    ] = None,
    settings: Settings = None,
    verbose: Verbose = False,
    json_output: Json = False,
) -> None:
    """Prepare, train and report in one go. Without arguments: Python's own library, no network, a few minutes.

    \b
    Examples:
      penstock run
      penstock run ~/src/project --out runs/project --set steps=500
      penstock run --repo . --verbose

    Run it again with the same --out and it goes on where it was.
    """
    from penstock.train.config import load_adapted

    wait_briefly()
    _refuse_ranks("`penstock run`", hint="use `penstock prepare`, then `torchrun … -m penstock train`")
    if repo is not None and inputs:
        raise ConfigError("both INPUT and --repo were given", hint="use one of them")
    words = [_repository(repo)] if repo is not None else inputs or ["stdlib:"]
    folder = out or Path("runs") / datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    loaded, adaptation = load_adapted(config, settings or [])
    resume = (folder / "checkpoints").is_dir()
    if resume:
        loaded = loaded.with_mix_of(folder)
    if adaptation is not None and adaptation.data is not None:
        if repo is not None or inputs or tokenizer:
            raise ConfigError(
                f"{config} names its own data and base model, and INPUT, --repo or --tokenizer was given too",
                hint="leave them out, or give a config without a data set",
            )
        with ExitStack() as stack:
            log = stack.enter_context(_recorded(folder, loaded, again=RUN_AGAIN))
            stores = _expert_stores(loaded, adaptation, folder, log, stack, resume=resume, verbose=verbose)
            first = next(iter(stores.values()))
            result = _train(loaded, first, folder, log, resume=resume, mixed_with=stores, shows_choices=verbose)
        _finish(folder, result, json_output=json_output)
        return
    if not json_output:
        note(f"preparing {one_line(' '.join(words))} into {folder / 'store'}")
    with _recorded(folder, loaded, again=RUN_AGAIN) as log:
        record_adapted(adaptation, log, verbose=verbose)
        _prepare(words, folder / "store", tokenizer, log, adaptation)
        with _opened(str(folder / "store"), folder, resume=resume) as store:
            result = _train(loaded, store, folder, log, resume=resume, shows_choices=verbose)
    _finish(folder, result, json_output=json_output)


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN")],
) -> None:
    """Write RUN/manifest.json and RUN/report.html anew from the run's records."""
    from penstock.report import write_manifest, write_page
    from penstock.runlog import RECORDS_NAME

    if not (run_folder / RECORDS_NAME).is_file():
        raise InputError(
            f"{str(run_folder)!r} is no run folder: it holds no {RECORDS_NAME}",
            hint="make one with `penstock run --out RUN` or `penstock train --out RUN`",
        )
    print(write_manifest(run_folder))
    print(write_page(run_folder))


def _expert_stores(
    config: TrainConfig,
    adaptation: Adaptation | None,
    folder: Path,
    log: RunLog,
    stack: ExitStack,
    *,
    resume: bool,
    cache: Path | None = None,
    verbose: bool = False,
) -> dict[str, Store]:
    """The stores of a manifest's tasks, prepared as far as they aren't yet, and opened."""
    assert adaptation is not None
    assert adaptation.data is not None
    record_adapted(adaptation, log, verbose=verbose)
    paths = prepared_stores(adaptation.data, folder, log, cache=cache, network=config.network)
    return _all_opened({name: str(path) for name, path in paths.items()}, folder, stack, resume=resume)


def _all_opened(names: Mapping[str, str], folder: Path, stack: ExitStack, *, resume: bool) -> dict[str, Store]:
    return {
        name: stack.enter_context(_opened(word, folder, resume=resume, name=name if number else None))
        for number, (name, word) in enumerate(names.items())
    }


def _opened(data: str, folder: Path, *, resume: bool, name: str | None = None) -> Store:
    """The store; of a run that goes on, the version that it was trained on so far, whatever was committed since.

    `name` is that of a store of a mixture after the first.
    """
    from penstock.report.steps import pinned_store
    from penstock.store import list_versions, open_store

    if not (resume and (folder / "checkpoints").is_dir()):
        return open_store(data)
    store = pinned_store(data, folder, name=name)
    newest = max(store.version, *list_versions(store.path))
    if store.version != newest:
        note(f"going on with version {store.version} of {one_line(store.location)}; the newest is {newest}")
    return store


def wait_briefly() -> None:
    """Has PyTorch's threads on a CPU spin for microseconds, not a millisecond, while they wait for each other.

    By its own count GNU's OpenMP spins for as long as the system gives a thread: beside other work a step took 30 times
    as long, by this one twice, and where cores are free as long as ever. It is read when PyTorch is first imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # whoever says how threads wait knows why
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


@contextmanager
def _recorded(folder: Path, config: TrainConfig, *, again: str) -> Iterator[RunLog]:
    """A run's log; however the run ends, its records say so and the manifest and page are written.

    `again` is how the command goes on after the disk refused something.
    """
    from penstock import fs
    from penstock.hardware import probe
    from penstock.report import write_manifest, write_page
    from penstock.runlog import RunLog

    if _is_follower():
        from penstock.train.distributed import SilentLog

        yield SilentLog()
        return
    hardware = probe().as_dict()
    disk_errors = partial(fs.fail_as_disk_error, f"writing the run in {folder}", again=again)
    with disk_errors(), RunLog(folder) as log:
        log.append(
            "start",
            command=shlex.join(["penstock", *sys.argv[1:]]),
            version=__version__,
            python=sys.version.split()[0],
            platform=hardware.get("platform", ""),
            hardware=hardware,
            config=config.model_dump(mode="json"),
        )
        try:
            with disk_errors():  # recorded with the hint that is printed
                yield log
        except PenstockError as error:
            log.append("end", status="failed", message=f"{error.message} (hint: {error.hint})")
            raise
        except BaseException as error:
            is_signal = not isinstance(error, Exception)
            log.append("end", status="interrupted" if is_signal else "failed", message=repr(error))
            raise
        finally:
            log.flush()
            write_manifest(folder)
            write_page(folder)


def _repository(path: Path) -> str:
    """The input that names a repository's history and files."""
    from penstock.sources.git.repository import local_git_folder
    from penstock.sources.git.words import SCHEME

    if path.exists():
        try:
            local_git_folder(os.path.realpath(path))
        except InputError as error:
            raise InputError(
                f"--repo: {error.message}", hint=f"to train on a folder's files: penstock run {shlex.quote(str(path))}"
            ) from None
    return f"{SCHEME}{path}"


def _prepare(words: list[str], out: Path, tokenizer: str | None, log: RunLog, adaptation: Adaptation | None) -> None:
    from penstock.hardware import default_workers, probe
    from penstock.sources import closing_all, leave_alone, sources_from_inputs
    from penstock.store import PrepareOptions, prepare
    from penstock.tokenize import load_tokenizer

    with log.phase("prepare") as detail:
        sources = sources_from_inputs(words, on_note=note)
        leave_alone(sources, out.parent)  # the run may lie inside its own input
        loaded = load_tokenizer(tokenizer) if tokenizer else None
        workers = (adaptation.workers if adaptation else None) or default_workers(probe())
        split = (adaptation.split if adaptation else None) or PrepareOptions.split
        options = PrepareOptions(split=split, workers=workers, processes=True, dedup="near")
        with closing_all(sources), progress_bar("preparing") as bar:
            result = prepare(sources, out, tokenizer=loaded, options=options, on_progress=bar)
        facts = prepare_facts(result)
        detail.update({name: facts[name] for name in ("documents", "tokens", "bytes", "units", "documents_reused")})
    engine = facts["tokenizer"]
    log.append(
        "choice",
        name="tokenizer",
        value=f"{engine['origin']} ({engine['vocab_size']:,} ids)",
        reason="trained on the input" if tokenizer is None else "given",
    )
    log.append("choice", name="tokenizer_engine", value=engine["engine"], reason=engine["reason"])
    reason = (
        "half the cores, within the config's limits" if adaptation and adaptation.workers else "one worker per core"
    )
    log.append("choice", name="prepare_workers", value=facts["workers"], reason=reason)


def _train(
    config: TrainConfig,
    store: Store,
    folder: Path,
    log: RunLog,
    *,
    resume: bool,
    shows_choices: bool,
    mixed_with: Mapping[str, Store] | None = None,
) -> TrainResult:
    from penstock import fs
    from penstock.train import train as train_model
    from penstock.train.config import CONFIG_NAME

    if _is_follower():
        return train_model(config, store, folder, log, resume=resume, mixed_with=mixed_with)
    _record_data(config, store, log, mixed_with or {store.path.name: store})
    fs.write_atomic(folder / CONFIG_NAME, json.dumps(config.model_dump(mode="json"), indent=2).encode() + b"\n")
    choices = (lambda: _table_of_choices(folder, log)) if shows_choices else None
    with log.phase("train") as detail, shown_records(choices) as show:
        result = train_model(
            config,
            store,
            folder,
            log,
            resume=resume,
            mixed_with=mixed_with,
            on_progress=show,
        )
        names = ("tokens", "steps", "parameters", "train_rows", "best_step", "best_val_loss", "stop_reason")
        detail.update({name: getattr(result, name) for name in names})
        if result.best_checkpoint is not None:
            detail["best_checkpoint"] = result.best_checkpoint.relative_to(folder).as_posix()
    log.append("end", status=result.status, message="")
    return result


def _table_of_choices(folder: Path, log: RunLog) -> list[tuple[str, ...]]:
    """What the run computes with and why, as its records have it; the reasons, of any length, last."""
    from penstock.runlog import read_records
    from penstock.train.tuning import COLUMNS, choice_rows

    log.flush()
    rows = [COLUMNS, *choice_rows(read_records(folder))]
    return [(name, value, gain, reason) for name, value, reason, gain in rows]


def _record_data(config: TrainConfig, store: Store, log: RunLog, stores: Mapping[str, Store]) -> None:
    """What is trained on: the figures of each store's version, and a few rows for the page."""
    from penstock.load.rows import describe_row
    from penstock.report.repository import repository_stats
    from penstock.train.start import training_mixture, training_plan

    mixture = training_mixture(config, stores)
    figures = {name: _figures(one) for name, one in stores.items()}
    mixed: dict[str, Any] = {}
    if mixture is not None:
        told = [{"name": name, "version": stores[name].version, **facts} for name, facts in figures.items()]
        mixed = {"mixture": mixture.describe(), "stores": told}
    log.append(
        "data",
        store_version=store.version,
        **next(iter(figures.values())),
        repository=repository_stats(stores.values()),
        **mixed,
    )
    if mixture is not None:
        shares = [f"{one['name']}={one['weight']:g} ({one['share']:.2%})" for one in mixed["mixture"]["mix"]]
        reason = f"{len(stores)} stores, weights as given"
        log.append("choice", name="mixture", value=", ".join(shares), reason=reason)
    named: list[tuple[dict[str, str], Plan]] = [({}, training_plan(config, store))] if mixture is None else []
    if mixture is not None:
        seen = [source for source in mixture.sources if source.weight]
        named = [({"source": source.name}, source.plan) for source in seen[:SAMPLE_ROWS]]
    tokenizer, rows_each = store.tokenizer(), SAMPLE_ROWS // len(named)
    for source, plan in named:
        numbers = range(0, plan.num_rows, max(plan.num_rows // rows_each, 1))[:rows_each]
        rows = [_row_for_page(describe_row(plan, number, tokenizer)) for number in numbers]
        log.append("rows", **source, split="train", seq_len=config.seq_len, rows=rows)


def _figures(store: Store) -> dict[str, Any]:
    """What a store holds, by the names of the records."""
    from penstock.store.statistics import statistics

    counts = store.manifest.counts
    return {
        "store": store.location,
        "digest": store.digest,
        **{name: counts[name] for name in ("documents", "tokens", "bytes", "splits", "skipped")},
        "statistics": asdict(statistics(store)),
    }


def _row_for_page(row: dict[str, Any]) -> dict[str, Any]:
    documents = [
        {"origin": document["key"], "tokens": document["row_end"] - document["row_start"], "text": document["text"]}
        for document in row["documents"]
    ]
    return {"row": row["row"], "documents": documents}


def _finish(folder: Path, result: TrainResult, *, json_output: bool) -> None:
    from penstock.report import summary_lines
    from penstock.runlog import read_records

    records = [] if _is_follower() else read_records(folder)
    if _is_follower():
        pass  # rank 0 says it
    elif json_output:
        print_json(json.loads((folder / "manifest.json").read_bytes()))
    else:
        samples = [record for record in records if record["kind"] == "sample"]
        if samples:
            print(f"\nsample after {samples[-1]['step']} steps:")
            text = samples[-1]["prompt"] + samples[-1]["text"]
            print("\n".join("  | " + one_line(line) for line in text.split("\n")))
            print()
        for line in summary_lines(records, run_folder=folder):
            print(line)
    if result.status == "interrupted" and not _is_follower():
        note("error: the run was stopped before its last step; everything so far is saved")
        note(f"hint: {RESUME} (`penstock run` resumes by itself)")
    if result.status == "interrupted":
        raise typer.Exit(INTERRUPTED_EXIT)


def _is_follower() -> bool:
    """Whether torchrun started this process as a rank other than 0: it trains, and writes and prints nothing."""
    if "RANK" not in os.environ:
        return False
    from penstock.train.distributed import world_of_environment

    return not world_of_environment().is_main


def _refuse_ranks(doing: str, hint: str) -> None:
    """Raises `ConfigError` where torchrun started several processes for something that one must do alone."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        raise ConfigError(f"{doing} is done by one process, torchrun started {os.environ['WORLD_SIZE']}", hint=hint)
