"""What `bench hygiene` runs in processes of its own: each rule over the corpus, and the scanner over planted secrets.

Rates are of processor time of the one thread, so that other programs of the machine matter less.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.bench.corpus import corpus_sources
from penstock.bench.planted import planted_secrets
from penstock.sources import DEFAULT_UNIT_BYTES, Document, SkipTally, UnitText
from penstock.sources.hygiene import Cleaning, CleaningOptions, content_problem
from penstock.sources.hygiene.content import head_of, is_minified
from penstock.sources.hygiene.secrets import redacted, secret_spans

__all__ = ["clean_corpus", "find_planted"]

PASSES = 3


def clean_corpus(*, inputs: Sequence[str], sample_bytes: int) -> dict[str, Any]:
    """MB/s of each rule and of all of them together, and what they find in the corpus."""
    documents = _sample(inputs, sample_bytes)
    texts = [document.parts[0].data for document in documents]
    num_bytes = sum(map(len, texts))
    cleaning = Cleaning(CleaningOptions(), is_code=True)

    def each(rule: Callable[[bytes], object]) -> Callable[[], object]:
        return lambda: [rule(text) for text in texts]

    measured = {
        "memory": each(lambda text: b"\0" in text),
        "text": each(content_problem),
        "minified": each(lambda text: is_minified(b"name.py", text)),
        "head": each(head_of),
        "secrets": each(secret_spans),
    }
    report: dict[str, Any] = {
        name: num_bytes / 1e6 / min(_seconds(work) for _ in range(PASSES)) for name, work in measured.items()
    }
    seconds = []
    for _ in range(PASSES):
        # Copies, made outside the time that counts, because cleaning writes down licences.
        text = UnitText(documents=[replace(document) for document in documents], skips=SkipTally())
        seconds.append(_seconds(lambda unit=text: cleaning.clean(unit)))  # type: ignore[misc]
    report["all"] = num_bytes / 1e6 / min(seconds)
    kinds = Counter(kind for text in texts for _, _, kind in secret_spans(text))
    left_out = cleaning.clean(UnitText(documents=documents, skips=SkipTally())).skips.counts
    return {
        **report,
        "megabytes": num_bytes / 1e6,
        "documents": len(documents),
        "kinds": dict(sorted(kinds.items())),
        "alarms_per_megabyte": kinds.total() / num_bytes * 1e6,
        "left_out": dict(sorted(left_out.items())),
    }


def find_planted(*, count: int) -> dict[str, Any]:
    """The share of planted secrets that are gone after redaction, in all and by format."""
    planted, found = Counter[str](), Counter[str]()
    for each in planted_secrets(count):
        planted[each.format] += 1
        found[each.format] += each.secret not in redacted(each.data, {})
    return {
        "percent": 100 * found.total() / planted.total(),
        "worst_percent": min(100 * found[name] / planted[name] for name in planted),
        "formats": {name: f"{found[name]} of {planted[name]}" for name in planted},
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _sample(inputs: Sequence[str], sample_bytes: int) -> list[Document]:
    """Every k-th document of the corpus, about `sample_bytes` together; they are all plain."""
    documents = [
        document
        for source in corpus_sources(inputs)
        for unit in source.units(DEFAULT_UNIT_BYTES)
        for document in source.read(unit).documents
    ]
    total = sum(document.num_bytes for document in documents)
    step = max(1, round(total / sample_bytes))
    return documents[step // 2 :: step]
