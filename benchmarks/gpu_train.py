"""The training figures of a machine with a GPU, in one sitting: python benchmarks/gpu_train.py OUT [--only SECTION]...

Sections, each with its own time limit and its own result file in OUT:

    124m      124M, rows of 1024: ours without a flag, document masks on and off, Trainer with defaults and tuned by
              hand, a plain loop, the same steps on one batch, one large product            train-gpu-124m.json
    350m      350M, rows of 1024: ours, a plain loop                                       train-gpu-350m.json
    1b        1.1B, rows of 2048: ours in bf16 and in float8, a plain loop                 train-gpu-1b.json
    lora      LoRA on a 1B-class model of transformers: ours, Trainer + peft               train-gpu-lora.json
    start     from the typed command to the first step: tuning cache cold and warm         train-gpu-start.json
    resume    a deterministic run, stopped and resumed, against a whole one                train-gpu-resume.json

A section's file is written after every round, so that a sitting cut short keeps what it has. The store, the models and
the caches are kept in --work between calls. `--smoke` runs everything in tiny sizes on any machine, to prove the
script. Wheels for packages that the machine lacks may lie in .carry/wheels, a vocabulary in .carry/gpt2.tokenizer.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / ".carry"
sys.path.insert(0, str(ROOT / "src"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


def install_carried_wheels() -> None:
    """Puts in what the machine lacks; nothing is fetched."""
    wheels = sorted((CARRIED / "wheels").glob("*.whl"))
    if wheels and importlib.util.find_spec("pydantic") is None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *map(str, wheels)]
        subprocess.run(command, check=True)


install_carried_wheels()

from penstock import fs  # noqa: E402
from penstock.bench import format_table, write_result  # noqa: E402
from penstock.bench import train as bench_train  # noqa: E402
from penstock.bench.processes import Outcome, Subject, measured  # noqa: E402
from penstock.bench.result import BenchResult, Bound, Ratio, Role, Row, completed, fastest, ratio, ratio_to  # noqa: E402
from penstock.bench.train import Case, Data  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.hardware import probe  # noqa: E402

LORA_OURS = "penstock train, LoRA"
LORA_PEFT = "Trainer + peft, tuned by hand"
LORA_PEFT_COMPILED = "Trainer + peft, tuned by hand, compiled"
LORA_RANK = 16
# What ours is told that the run has, so that it chooses as it does for a run of hours.
LONG_RUN_STEPS = 20_000
# No measurement is begun with less time than this left in its section.
SECONDS_TO_BEGIN = 20.0


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """What all sections share."""

    out: Path
    work: Path
    data: Data
    is_smoke: bool
    has_gpu: bool
    rounds: int

    def case(self, *, preset: str, seq_len: int, batch_size: int, steps: int, overrides: Sequence[str] = ()) -> Case:
        """A model to train; in a smoke run the smallest, whatever was asked."""
        if self.is_smoke:
            tiny = ("model.num_layers=1", "model.hidden_size=32", "model.feed_forward_size=48", "model.num_heads=2")
            return Case(
                preset="tiny",
                seq_len=32,
                batch_size=4,
                steps=5,
                warm_up_steps=2,
                has_gpu=self.has_gpu,
                workers=1,
                overrides=tiny,
            )
        return Case(
            preset=preset,
            seq_len=seq_len,
            batch_size=batch_size,
            steps=steps,
            warm_up_steps=steps // 4,
            has_gpu=self.has_gpu,
            workers=8,
            overrides=tuple(overrides),
            planned_steps=LONG_RUN_STEPS,
        )


def main() -> int:
    arguments = parsed()
    fs.make_folder(arguments.out)
    fs.make_folder(arguments.work)
    hardware = probe()
    store = made_store(arguments.work, smoke=arguments.smoke, tokenizer=arguments.tokenizer)
    sitting = Sitting(
        out=arguments.out,
        work=arguments.work,
        data=bench_train.data_of(store, arguments.work),
        is_smoke=arguments.smoke,
        has_gpu=bool(hardware.gpus),
        rounds=1 if arguments.smoke else arguments.rounds,
    )
    failed = False
    for name in arguments.only or SECTIONS:
        section, usual_limit_seconds = SECTIONS[name]
        limit_seconds = arguments.limit or usual_limit_seconds
        started = time.monotonic()
        say(f"== {name}, at most {limit_seconds:.0f} s")
        try:
            section(sitting, started + limit_seconds)
        except PenstockError as error:
            failed = True
            say(f"error: section {name}: {error.message}")
        say(f"== {name} took {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the result files")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="this section (may be repeated)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu-train", help="store, models and caches")
    parser.add_argument("--tokenizer", type=Path, default=CARRIED / "gpt2.tokenizer.json")
    parser.add_argument("--rounds", type=int, default=2, help="interleaved rounds of the sections that compare")
    parser.add_argument("--limit", type=float, help="seconds for each section, instead of its own limit")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any machine: proves the script")
    arguments = parser.parse_args()
    arguments.out, arguments.work = arguments.out.resolve(), arguments.work.resolve()
    return arguments


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def made_store(work: Path, *, smoke: bool, tokenizer: Path) -> str:
    """The corpus: Python's own library in GPT-2's vocabulary where that is at hand, else in one trained on it."""
    store = work / ("store-smoke" if smoke else "store")
    if not (store / "manifests").exists():
        words = [str(Path(json.__file__).parent), "--vocab-size", "400"] if smoke else ["stdlib:"]
        if not smoke:
            words += ["--tokenizer", str(tokenizer)] if tokenizer.exists() else ["--vocab-size", "50257"]
        done = penstock("prepare", *words, "--out", store)
        if done.returncode != 0:
            raise PenstockError(f"preparing the store failed: {last_line(done)}", hint="run that command by hand")
    return str(store)


def penstock(*words: object, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command as typed."""
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [f"status {done.returncode}"])[-1]


# Rounds.


def interleaved(
    subjects: Sequence[Subject],
    *,
    sitting: Sitting,
    rounds: int,
    deadline: float,
    after_round: Callable[[Mapping[str, Outcome]], None],
) -> None:
    """Measures in turn, as `measured` does, but a failure of ours is a row that says so, and time may run out."""
    outcomes = {subject.name: Outcome(subject=subject) for subject in subjects}
    for number in range(rounds):
        for subject in subjects:
            outcome = outcomes[subject.name]
            if outcome.skipped is None and number < (subject.repeats or rounds):
                measure(subject, outcome, sitting=sitting, deadline=deadline, words=f"{number + 1} of {rounds}")
        after_round(outcomes)
        if time.monotonic() > deadline - SECONDS_TO_BEGIN:
            return


def measure(subject: Subject, outcome: Outcome, *, sitting: Sitting, deadline: float, words: str) -> None:
    left = deadline - time.monotonic()
    if left < SECONDS_TO_BEGIN:
        if not outcome.reports:
            outcome.skipped = "no time was left"
        return
    timed = replace(subject, timeout_seconds=min(subject.timeout_seconds or left, left), repeats=None)
    started = time.monotonic()
    try:
        found = measured([timed], repeats=1, folder=sitting.work, tell=lambda line: None)[subject.name]
    except PenstockError as error:
        outcome.skipped = error.message
    else:
        outcome.reports += found.reports
        outcome.skipped = found.skipped if not outcome.reports else None
    rate = outcome.reports[-1].get("tokens_per_second") if outcome.reports else None
    told = outcome.skipped or (f"{rate:,.0f} tokens/s" if rate else "done")
    say(f"{subject.name}, {words}: {told} ({time.monotonic() - started:.0f} s)")


def written(sitting: Sitting, result: BenchResult, *, section: str) -> None:
    command = f"python benchmarks/gpu_train.py OUT --only {section}" + (" --smoke" if sitting.is_smoke else "")
    complete = completed(result, command=command)
    if sitting.is_smoke:  # never to be taken for figures
        complete["benchmark"] = f"smoke-{result.benchmark}"
    path = write_result(complete, sitting.out)
    print(format_table(complete), f"written to {path}", sep="\n", end="\n\n", flush=True)


def compared(
    section: str,
    sitting: Sitting,
    deadline: float,
    *,
    case: Case,
    subjects: Sequence[Subject],
    ratios: Callable[[Mapping[str, Row], Mapping[str, Outcome]], list[Ratio]],
    rounds: int,
) -> None:
    """Measures the subjects, and writes rows and ratios after each round."""

    def after_round(outcomes: Mapping[str, Outcome]) -> None:
        rows = bench_train.rows_of(outcomes)
        result = bench_train.result_of(
            f"train-gpu-{section}", case, sitting.data, outcomes, repeats=rounds, ratios=ratios(rows, outcomes)
        )
        written(sitting, result, section=section)

    interleaved(subjects, sitting=sitting, rounds=rounds, deadline=deadline, after_round=after_round)


def promise(rows: Mapping[str, Row], name: str, of: str, target: float, bound: Bound = Bound.AT_LEAST) -> list[Ratio]:
    """A row against a promised number; nothing where it wasn't measured."""
    return [ratio_to(name, rows[of], target, bound=bound)] if of in rows else []


# Sections.


def section_124m(sitting: Sitting, deadline: float) -> None:
    case = sitting.case(preset="small", seq_len=1024, batch_size=64, steps=40)

    def ratios(rows: Mapping[str, Row], outcomes: Mapping[str, Outcome]) -> list[Ratio]:
        ours = bench_train.OURS
        return [
            *bench_train.usual_ratios(rows, outcomes),
            *(promise(rows, "train to the promised rate", ours, 540_000.0) if sitting.has_gpu else []),
            *(promise(rows, "MFU to the promise", f"{ours}, MFU", 47.0) if sitting.has_gpu else []),
            *stall_promise(rows, sitting),
        ]

    subjects = bench_train.subjects_of(case, sitting.data)
    compared("124m", sitting, deadline, case=case, subjects=subjects, ratios=ratios, rounds=sitting.rounds)


def stall_promise(rows: Mapping[str, Row], sitting: Sitting) -> list[Ratio]:
    """Data stall below 0.5 %."""
    row = f"{bench_train.OURS}, wait for data"
    return promise(rows, "wait for data to the promise", row, 0.5, Bound.AT_MOST) if sitting.has_gpu else []


def section_350m(sitting: Sitting, deadline: float) -> None:
    case = sitting.case(preset="medium", seq_len=1024, batch_size=32, steps=32)

    def ratios(rows: Mapping[str, Row], outcomes: Mapping[str, Outcome]) -> list[Ratio]:
        mfu = promise(rows, "MFU to the promise", f"{bench_train.OURS}, MFU", 51.0) if sitting.has_gpu else []
        return [*mfu, *stall_promise(rows, sitting), *plain_ratio(rows)]

    subjects = [
        bench_train.our_subject(bench_train.OURS, case, sitting.data),
        bench_train.plain_subject(case, sitting.data),
    ]
    compared("350m", sitting, deadline, case=case, subjects=subjects, ratios=ratios, rounds=sitting.rounds)


def plain_ratio(rows: Mapping[str, Row]) -> list[Ratio]:
    return [ratio("train to a plain loop", rows[bench_train.OURS], rows[bench_train.PLAIN])]


def section_1b(sitting: Sitting, deadline: float) -> None:
    sizes = ("model.num_layers=20", "model.feed_forward_size=5504")
    case = sitting.case(preset="xlarge", seq_len=2048, batch_size=16, steps=24, overrides=sizes)

    def ratios(rows: Mapping[str, Row], outcomes: Mapping[str, Outcome]) -> list[Ratio]:
        ours, float8 = rows[bench_train.OURS], rows[bench_train.OURS_FLOAT8]
        required = 1.2 if sitting.has_gpu else None
        found = [ratio("float8 to bf16", float8, ours, required=required), *plain_ratio(rows)]
        found += promise(rows, "MFU to the promise", f"{bench_train.OURS}, MFU", 58.0) if sitting.has_gpu else []
        return [*found, *stall_promise(rows, sitting), *loss_ratio(outcomes)]

    subjects = [
        bench_train.our_subject(bench_train.OURS, case, sitting.data),
        bench_train.our_subject(bench_train.OURS_FLOAT8, case, sitting.data, model__float8=True),
        bench_train.plain_subject(case, sitting.data),
    ]
    compared("1b", sitting, deadline, case=case, subjects=subjects, ratios=ratios, rounds=sitting.rounds)


def loss_ratio(outcomes: Mapping[str, Outcome]) -> list[Ratio]:
    """Float8's last training loss over bf16's: the same seed, batches and steps."""
    names = (bench_train.OURS_FLOAT8, bench_train.OURS)
    losses = [[report["final_loss"] for report in outcomes[name].reports] for name in names]
    if not all(losses):
        return []
    float8, bf16 = (
        Row(name=f"{name}, last training loss", role=Role.OURS, unit="nats", values=tuple(values))
        for name, values in zip(names, losses, strict=True)
    )
    return [ratio("loss of float8 to bf16", float8, bf16, required=1.01, bound=Bound.AT_MOST)]


def section_lora(sitting: Sitting, deadline: float) -> None:
    """The base has the sizes of Llama 3.2 1B, with our vocabulary and weights that were drawn."""
    case = sitting.case(preset="small", seq_len=1024, batch_size=16, steps=32)
    base = str(sitting.work / ("base-smoke" if sitting.is_smoke else "base-1b"))
    shape = bench_train.shape_of(case, sitting.data)
    if not sitting.is_smoke:
        sizes = {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "feed_forward_size": 8192}
        shape = {**shape, **sizes, "max_positions": 2048, "rope_theta": 500_000.0}
    setup = [("training_peers:write_base_model", {"shape": shape, "out": base})]
    adapter = f"{{kind: lora, rank: {LORA_RANK}}}"
    plain = replace(case, overrides=())
    overrides = [each for each in plain.settings() if not each.startswith("model.")]
    ours = Subject(
        name=LORA_OURS,
        role=Role.OURS,
        task="training:train_steps",
        settings={
            "store": sitting.data.store,
            "overrides": [*overrides, f"model.pretrained={base}", f"model.adapter={adapter}"],
            "warm_up_steps": case.warm_up_steps,
        },
        setup=setup,
    )
    peers = [
        Subject(
            name=name,
            role=Role.PEER,
            task="training_peers:peft_steps",
            settings={
                **bench_train.peer_settings(case, sitting.data, batch_size=case.batch_size),
                "base": base,
                "rank": LORA_RANK,
                "arguments": bench_train.tuned_arguments(case, compile_model=is_compiled),
            },
            setup=setup,
        )
        for name, is_compiled in ((LORA_PEFT, False), (LORA_PEFT_COMPILED, True))
    ]

    def ratios(rows: Mapping[str, Row], outcomes: Mapping[str, Outcome]) -> list[Ratio]:
        best = fastest([rows[LORA_PEFT], rows[LORA_PEFT_COMPILED]])
        return [ratio("LoRA to Trainer + peft", rows[LORA_OURS], best, required=1.5 if sitting.has_gpu else None)]

    compared("lora", sitting, deadline, case=case, subjects=[ours, *peers], ratios=ratios, rounds=sitting.rounds)


def section_start(sitting: Sitting, deadline: float) -> None:
    """Seconds from the command to the record of the first step, as a user waits for them."""
    case = sitting.case(preset="small", seq_len=1024, batch_size=64, steps=60)
    caches = sitting.work / f"caches-{os.getpid()}"
    environment = {"XDG_CACHE_HOME": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    # As a long run would choose: the number of steps decides whether compiling pays back.
    cases = [
        ("command to first step, all caches cold", [], None),
        ("command to first step, caches warm, compiled per block", [], 30.0),
        ("command to first step, caches warm, no compile", ["compile=off"], 15.0),
    ]
    rows, ratios = [], []
    for number, (name, settings, most_seconds) in enumerate(cases):
        if time.monotonic() > deadline - SECONDS_TO_BEGIN:
            rows.append(Row(name=name, role=Role.OURS, unit="s", skipped="no time was left"))
            continue
        if settings and sitting.has_gpu:
            first_step_seconds(sitting, case, settings, environment, f"warming-{number}")
        seconds = first_step_seconds(sitting, case, settings, environment, str(number))
        if isinstance(seconds, str):
            rows.append(Row(name=name, role=Role.OURS, unit="s", skipped=seconds))
        else:
            rows.append(Row(name=name, role=Role.OURS, unit="s", values=(seconds,)))
            if most_seconds is not None and sitting.has_gpu:
                ratios.append(ratio_to(f"{name}, to the promise", rows[-1], most_seconds, bound=Bound.AT_MOST))
        say(f"{name}: {seconds}")
        settings_told = {"model": case.preset, "batch": f"{case.batch_size} x {case.seq_len} tokens", "repeats": 1}
        result = BenchResult(benchmark="train-gpu-start", settings=settings_told, rows=rows, ratios=ratios)
        written(sitting, result, section="start")
    fs.remove_tree(caches)


def first_step_seconds(
    sitting: Sitting, case: Case, settings: Sequence[str], environment: Mapping[str, str], name: str
) -> float | str:
    """From starting the command to its first step's record, or why there is none."""
    run = sitting.work / f"start-{os.getpid()}-{name}"
    steps = 3 if sitting.is_smoke else LONG_RUN_STEPS
    words = [word for each in [*case.settings(steps=steps, stop_after_steps=3), *settings] for word in ("--set", each)]
    started = time.time()
    done = penstock("train", "--data", sitting.data.store, "--out", run, *words, environment=environment)
    records = records_of(run)
    moments = [record["time"] for record in records if record["kind"] == "step"]
    way = next((record["value"] for record in records if record.get("name") == "compile"), None)
    if sitting.has_gpu and way != ("off" if settings else "blocks"):
        return f"the run chose compile={way}"
    fs.remove_tree(run)
    return moments[0] - started if moments else last_line(done)


def records_of(run: Path) -> list[dict[str, Any]]:
    from penstock.runlog import read_records

    return read_records(run)


def section_resume(sitting: Sitting, deadline: float) -> None:
    """Losses of a deterministic run that was stopped and resumed, against those of a whole one."""
    steps = 6 if sitting.is_smoke else 20
    case = sitting.case(preset="small", seq_len=256, batch_size=16, steps=steps)
    names = {name: sitting.work / f"resume-{os.getpid()}-{name}" for name in ("whole", "cut")}
    settings = case.settings(steps=steps, stop_after_steps="null", checkpoint_every_steps=steps // 2)
    common = [word for each in settings for word in ("--set", each)] + ["--deterministic"]
    data = ["--data", sitting.data.store]
    penstock("train", *data, "--out", names["whole"], *common)
    penstock("train", *data, "--out", names["cut"], *common, "--set", f"stop_after_steps={steps // 2}")
    done = penstock("train", *data, "--out", names["cut"], *common, "--resume")
    losses = {
        name: {one["step"]: one["loss"] for one in records_of(run) if one["kind"] == "step"}
        for name, run in names.items()
    }
    name = "losses equal to the last bit after a resume"
    if len(losses["whole"]) == len(losses["cut"]) == steps:
        equal = sum(losses["whole"][step] == losses["cut"][step] for step in losses["whole"])
        row = Row(name=name, role=Role.OURS, unit="% of steps", values=(100 * equal / steps,))
    else:
        row = Row(name=name, role=Role.OURS, unit="% of steps", skipped=last_line(done))
    told = {"model": case.preset, "batch": f"{case.batch_size} x {case.seq_len} tokens", "steps": steps}
    result = BenchResult(
        benchmark="train-gpu-resume", settings=told, rows=[row], ratios=[ratio_to("equal losses", row, 100.0)]
    )
    written(sitting, result, section="resume")
    for run in names.values():
        fs.remove_tree(run)


SECTIONS: dict[str, tuple[Callable[[Sitting, float], None], float]] = {
    "124m": (section_124m, 540.0),
    "350m": (section_350m, 240.0),
    "1b": (section_1b, 330.0),
    "lora": (section_lora, 300.0),
    "start": (section_start, 240.0),
    "resume": (section_resume, 150.0),
}
"""Name -> what it does, and the seconds it may take: 30 minutes in all, in calls of at most ten (124m; 350m and 1b;
lora, start and resume need two)."""


if __name__ == "__main__":
    sys.exit(main())
