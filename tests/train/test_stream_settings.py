"""Order and transforms as settings of a run: they reach the model, are recorded, and a resumed run is the same run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.train.run as run_module
from penstock.errors import ConfigError, ResumeError, TokenizerError
from penstock.load import Loader
from penstock.load.mixed import MixedLoader
from penstock.load.order import order_named
from penstock.load.torch import TorchLoader
from penstock.load.transforms import FillInTheMiddle, RandomCrop
from penstock.pack import make_plan
from penstock.pack.mixture import make_mixture
from penstock.report.steps import describe_step
from penstock.runlog import RunLog, read_records
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.tokenize import train_tokenizer
from penstock.train import load_config, train

from .conftest import losses, tiny_config

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="session")
def code_path(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> Path:
    """The texts of `store`, with a vocabulary that has marks for fill-in-the-middle."""
    folder = tmp_path_factory.mktemp("code")
    texts = store_path.parent / "texts"
    tokenizer = train_tokenizer(
        [path.read_bytes() for path in sorted(texts.iterdir())], vocab_size=320, control_tokens=MARKS
    )
    source = FilesSource(name="texts", root=str(texts))
    prepare([source], folder / "store", tokenizer=tokenizer, options=PrepareOptions(unit_bytes=2000))
    return folder / "store"


@pytest.fixture
def code(code_path: Path) -> Iterator[Store]:
    with open_store(code_path) as opened:
        yield opened


Trained = Callable[..., list[list[list[int]]]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Trains and gives the tokens of every batch that the loop asked for."""
    seen: list[list[list[int]]] = []

    class Watched(TorchLoader):
        def __next__(self) -> Any:
            batch = super().__next__()
            seen.append(batch.tokens.tolist())
            return batch

    monkeypatch.setattr(run_module, "TorchLoader", Watched)

    def run(folder: Path, store: Store, *overrides: str, resume: bool = False, **more: Any) -> list[list[list[int]]]:
        seen.clear()
        config = tiny_config("eval_every_steps=null", "sample_tokens=0", *overrides)
        with RunLog(folder) as log:
            log.append("start", config=config.model_dump(mode="json"))
            log.append("data", store=store.location, store_version=store.version, digest=store.digest)
            train(config, store, folder, log, resume=resume, **more)
        return list(seen)

    return run


def expected(store: Store, *, steps: int = 8, policy: str = "concat", **options: Any) -> list[list[list[int]]]:
    plan = make_plan(store, seq_len=32, policy=policy)
    made = {name: maker(plan) if callable(maker) else maker for name, maker in options.items()}
    with Loader(plan, batch_rows=4, seed=42, **made) as loader:
        return [batch.tokens.tolist() for batch in itertools.islice(loader, steps)]


def choices_of(folder: Path) -> dict[str, str]:
    return {record["name"]: record["value"] for record in read_records(folder) if record["kind"] == "choice"}


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sequential": (["order=sequential"], {"shuffle": False}),
    "group-by-length": (
        ["order=group-by-length", "pack=pad"],
        {"policy": "pad", "order": lambda plan: order_named("group_by_length", plan, seed=42)},
    ),
    "curriculum": (["order=curriculum", "pack=pad"], {}),
    "segments": (
        ["order=segments", "window_segments=1"],
        {"order": lambda plan: order_named("segments", plan, seed=42, window_segments=1)},
    ),
    "fim": (
        ["fim_rate=1", "fim_spm_rate=0.25"],
        {"transforms": lambda plan: [FillInTheMiddle.for_plan(plan, rate=1.0, spm_rate=0.25)]},
    ),
    "crop": (
        ["random_crop=0.5", "random_crop_smallest=0.25"],
        {"transforms": lambda plan: [RandomCrop.for_plan(plan, rate=0.5, smallest_share=0.25)]},
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_model_gets_what_was_asked_for_and_a_resumed_run_is_the_same(
    tmp_path: Path, code: Store, trained: Trained, name: str
) -> None:
    settings, options = CASES[name]
    whole = trained(tmp_path / "whole", code, *settings)
    usual = expected(code, policy=options.get("policy", "concat"))
    assert whole != usual
    if name == "curriculum":
        assert_short_documents_come_first(code, whole)
    else:
        assert whole == expected(code, **options)
    told_choices = choices_of(tmp_path / "whole")
    assert told_choices["order"] == (name if settings[0].startswith("order") else "shuffled")
    assert [told_choices.get("fill_in_the_middle"), told_choices.get("random_crop")] == [
        "1" if name == "fim" else None,
        "0.5" if name == "crop" else None,
    ]
    for stop in (1, 4, 7):
        folder = tmp_path / f"stopped-{stop}"
        before = trained(folder, code, *settings, f"stop_after_steps={stop}")
        after = trained(folder, code, *settings, resume=True)
        assert before[:stop] + after == whole
        assert losses(folder) == losses(tmp_path / "whole")
    # And `inspect --step` tells the same rows.
    for step in (1, 8):
        told = describe_step(tmp_path / "stopped-4", step)
        tokenizer = code.tokenizer()
        for row, tokens in zip(told["rows"], whole[step - 1], strict=True):
            if told["transforms"]:
                assert row["as_trained"] == tokenizer.decode(np.array(tokens[:-1]))
            else:
                text = "".join(document["text"] for document in row["documents"])
                assert text == tokenizer.decode(np.array(tokens[: row["tokens"]]))


def assert_short_documents_come_first(store: Store, batches: list[list[list[int]]]) -> None:
    """Rows of padded documents, those of the shortest documents of the store first."""
    plan = make_plan(store, seq_len=32, policy="pad")
    with Loader(plan, batch_rows=plan.num_rows, shuffle=False, prefetch_batches=0) as loader:
        rows = [tuple(row) for row in next(loader).tokens.tolist()]
    lengths = store.arrays["length"][plan.spans(np.arange(plan.num_rows)).document].tolist()
    known = set(zip(rows, lengths, strict=True))  # ends of documents may be alike
    seen = [tuple(row) for batch in batches for row in batch]
    assert [pair for pair in zip(seen, sorted(lengths), strict=False) if pair not in known] == []
    assert len(set(sorted(lengths)[: len(seen)])) > 5


def test_a_mixture_has_a_curriculum_per_source_and_transforms(tmp_path: Path, code: Store, trained: Trained) -> None:
    settings = ["order=curriculum", "pack=pad", "mix=['texts/0*=2']", "random_crop=0.3"]
    whole = trained(tmp_path / "whole", code, *settings)
    mixture = make_mixture({"store": code}, ["texts/0*=2"], policy="pad", seq_len=32)
    crop = RandomCrop.for_plan(mixture, rate=0.3)  # type: ignore[arg-type]  has all that is asked of a plan
    with MixedLoader(mixture, batch_rows=4, seed=42, transforms=[crop]) as shuffled:
        assert whole != [next(shuffled).tokens.tolist() for _ in range(8)]
    trained(tmp_path / "run", code, *settings, "stop_after_steps=3")
    assert trained(tmp_path / "run", code, *settings, resume=True) == whole[3:]


def test_a_window_of_segments_is_as_wide_as_asked(tmp_path: Path, code: Store, trained: Trained) -> None:
    assert len(code.manifest.segments) > 8
    widths = [trained(tmp_path / str(width), code, "order=segments", f"window_segments={width}") for width in (1, 4, 8)]
    assert widths[0] != widths[1] != widths[2] == trained(tmp_path / "usual", code, "order=segments")


def test_a_fact_orders_rows_and_an_unknown_one_is_refused_by_name(tmp_path: Path, trained: Trained) -> None:
    lines = [f'{{"text": "{"ab cd " * (3 + n % 7)}number {n}", "grade": {(n * 37) % 101}}}' for n in range(120)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    from penstock.sources import sources_from_inputs

    prepare(sources_from_inputs([str(tmp_path / "rows.jsonl")]), tmp_path / "store", options=PrepareOptions())
    with open_store(tmp_path / "store") as store:
        settings = ["order=curriculum", "pack=pad"]
        batches = trained(tmp_path / "run", store, *settings, "curriculum_by=grade")
        tokenizer = store.tokenizer()
        texts = [tokenizer.decode(np.array(row)) for batch in batches for row in batch]  # a short row says its number
        numbers = [int(text.split("number ")[1].split("<")[0]) for text in texts if "number " in text]
        grades = [number * 37 % 101 for number in numbers]
        assert len(grades) > 20
        assert grades == sorted(grades)
        with pytest.raises(ConfigError, match="'grades'") as caught:
            trained(tmp_path / "other", store, *settings, "curriculum_by=grades")
        assert "grade" in caught.value.hint


def test_a_vocabulary_without_marks_is_one_clear_error(tmp_path: Path, store: Store, trained: Trained) -> None:
    with pytest.raises(TokenizerError, match="fill-in-the-middle") as caught:
        trained(tmp_path / "run", store, "fim_rate=0.5")
    assert "control tokens" in caught.value.hint


def test_marks_may_be_named(tmp_path: Path, code: Store, trained: Trained) -> None:
    names = "fim_tokens=[<fim_prefix>, <fim_suffix>, <fim_middle>]"
    assert trained(tmp_path / "one", code, "fim_rate=1", names) == trained(tmp_path / "two", code, "fim_rate=1")
    with pytest.raises(TokenizerError, match="<pre>"):
        trained(tmp_path / "three", code, "fim_rate=1", "fim_tokens=[<pre>, <suf>, <mid>]")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["order=backwards"], "order"),
        (["curriculum_by=time"], "curriculum_by"),
        (["order=sequential", "curriculum_by=time"], "curriculum_by"),
        (["window_segments=8"], "window_segments"),
        (["order=segments", "window_segments=0"], "window_segments"),
        (["fim_spm_rate=0.5"], "fim_spm_rate"),
        (["fim_tokens=[a, b, c]"], "fim_tokens"),
        (["fim_rate=1", "fim_tokens=[a, b]"], "fim_tokens"),
        (["fim_rate=1.5"], "fim_rate"),
        (["random_crop=-0.1"], "random_crop"),
        (["random_crop_smallest=0.2"], "random_crop_smallest"),
        (["random_crop=.nan"], "random_crop"),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused_by_name(settings: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config(None, settings)


def test_groups_by_length_of_a_mixture_are_refused(tmp_path: Path, code: Store, trained: Trained) -> None:
    with pytest.raises(ConfigError, match="mixture"):
        trained(tmp_path / "run", code, "order=group-by-length", "mix=['texts/0*=2']")


@pytest.mark.parametrize("change", ["order=sequential", "random_crop=0.5", "fim_rate=0.5"])
def test_a_run_is_bound_to_its_order_and_transforms(tmp_path: Path, code: Store, trained: Trained, change: str) -> None:
    trained(tmp_path / "run", code, "stop_after_steps=2")
    with pytest.raises(ResumeError, match=change.partition("=")[0]):
        trained(tmp_path / "run", code, change, resume=True)
