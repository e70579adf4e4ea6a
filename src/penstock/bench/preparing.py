"""Raw files to tokens on disk, timed: tasks of the prepare benchmark, and the store that other benchmarks read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute

from penstock import fs
from penstock.bench.corpus import corpus_documents, corpus_sources, evenly_sampled
from penstock.errors import DamagedStoreError
from penstock.hardware import peak_memory_bytes
from penstock.sources.hygiene import CleaningOptions
from penstock.store import PrepareOptions, open_store, prepare, verify
from penstock.tokenize import load_tokenizer

__all__ = ["map_with_datasets", "prepare_store", "tokenize_with_datatrove"]


def prepare_store(
    *,
    inputs: Sequence[str],
    tokenizer: str,
    workers: int,
    out: str,
    keep: bool = False,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Prepares the corpus into a new store and verifies it.

    The time counted is everything from opening the tokenizer file to the commit: its self-check, the walk, reading,
    encoding, writing with fsync, the index. Not counted, on the other sides neither: starting Python and importing
    libraries; nor `verify`, which is given apart. `choices` are rules over content and `dedup`, where not the default.
    """
    import awkward  # type: ignore[import-untyped]  # noqa: F401  gigatoken imports it at its first batch

    sources = corpus_sources(inputs)
    started = time.perf_counter()
    opened = load_tokenizer(tokenizer)
    tokenizer_seconds = time.perf_counter() - started
    units_done = started

    def on_progress(done: int, total: int) -> None:
        nonlocal units_done
        units_done = time.perf_counter()

    result = prepare(
        sources,
        Path(out),
        tokenizer=opened,
        options=_options(workers, choices or {}),
        on_progress=on_progress,
    )
    ended = time.perf_counter()
    peak_memory = peak_memory_bytes(children=workers if "process" in result.workers else 0)
    with open_store(out) as store:
        document_bytes = pyarrow.compute.sum(store.provenance()["text_bytes"]).as_py()
    tokens = sum(entry.tokens for entry in result.manifest.segments)
    verify_seconds = _verified(Path(out))
    store_bytes = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())
    if not keep:
        fs.remove_tree(Path(out))
    return {
        "seconds": ended - started,
        "megabytes_per_second": document_bytes / 1e6 / (ended - started),
        "tokens_per_second": tokens / (ended - started),
        "peak_memory_bytes": peak_memory,
        "verify_seconds": verify_seconds,
        "phases": {
            "tokenizer file": tokenizer_seconds,
            "self-check, walk, read, encode, write": units_done - started - tokenizer_seconds,
            "index, commit": ended - units_done,
        },
        "workers": result.workers,
        "document_bytes": document_bytes,
        "documents": result.manifest.num_documents,
        "tokens": tokens,
        "store_bytes": store_bytes,
        "engine": opened.engine.name,
        "digest": result.manifest.digest,
    }


def _options(workers: int, choices: Mapping[str, Any]) -> PrepareOptions:
    rules = {name: value for name, value in choices.items() if name != "dedup"}
    dedup = choices.get("dedup", PrepareOptions().dedup)
    return PrepareOptions(workers=workers, processes=True, dedup=dedup, cleaning=CleaningOptions(**rules))


def _verified(path: Path) -> float:
    started = time.perf_counter()
    problems = verify(path)
    if problems:
        raise DamagedStoreError(
            f"the store just prepared has {len(problems)} problems, the first: {problems[0].detail}",
            hint="this is a bug or a failing disk",
        )
    return time.perf_counter() - started


def map_with_datasets(
    *, inputs: Sequence[str], tokenizer: str, workers: int, sample_bytes: int, out: str
) -> dict[str, Any]:
    """Hugging Face datasets: texts in memory, `map` with the same vocabulary in worker processes, `save_to_disk`.

    Reading the files isn't counted, and neither is packing: both favour it.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer as Reference
    from transformers import PreTrainedTokenizerFast

    sample = evenly_sampled(corpus_documents(inputs), sample_bytes)
    texts = [document.decode() for document in sample]
    reference = Reference.from_str(load_tokenizer(tokenizer).spec.encoder_json)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=reference, model_max_length=10**12)  # type: ignore[no-untyped-call]

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], return_attention_mask=False)["input_ids"]}

    started = time.perf_counter()
    dataset = Dataset.from_dict({"text": texts})
    encoded = dataset.map(encode, batched=True, num_proc=workers, remove_columns=["text"])
    encoded.save_to_disk(out, num_proc=workers)
    seconds = time.perf_counter() - started
    fs.remove_tree(Path(out))
    megabytes = sum(map(len, sample)) / 1e6
    return {
        "megabytes_per_second": megabytes / seconds,
        "seconds": seconds,
        "megabytes": megabytes,
        "documents": len(sample),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def tokenize_with_datatrove(
    *, inputs: Sequence[str], tokenizer: str, workers: int, sample_bytes: int, out: str
) -> dict[str, Any]:
    """datatrove: JSONL reader and document tokenizer, a process per worker, no shuffling.

    Counted from the start of its executor to the last file; writing the JSONL it reads isn't.
    """
    import logging

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.remove()
    logging.disable(logging.WARNING)
    folder = Path(out)
    sample = evenly_sampled(corpus_documents(inputs), sample_bytes)
    fs.make_folder(folder / "input")
    for number in range(workers):
        lines = (json.dumps({"text": text.decode(), "id": str(n)}) for n, text in enumerate(sample[number::workers]))
        fs.write_atomic(folder / "input" / f"{number}.jsonl", "\n".join(lines).encode())
    spec = load_tokenizer(tokenizer).spec
    plain = folder / "tokenizer.json"
    fs.write_atomic(plain, spec.source_json)
    end_token = next(name for name, token in spec.control_tokens.items() if token == spec.end_id)
    started = time.perf_counter()
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(folder / "input"), doc_progress=False, file_progress=False),
            DocumentTokenizer(
                str(folder / "tokens"), tokenizer_name_or_path=str(plain), eos_token=end_token, shuffle_documents=False
            ),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(folder / "logs"),
        start_method="fork",
    ).run()
    seconds = time.perf_counter() - started
    written = sum(path.stat().st_size for path in (folder / "tokens").glob("*.ds"))
    fs.remove_tree(folder)
    megabytes = sum(map(len, sample)) / 1e6
    return {
        "megabytes_per_second": megabytes / seconds,
        "seconds": seconds,
        "megabytes": megabytes,
        "documents": len(sample),
        "written_bytes": written,
    }
