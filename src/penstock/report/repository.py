"""What is known of the git repositories behind a store: how many commits, by how many people, over what time.

In: open stores; the `facts` column of their documents, read in batches. Out: counts for the manifest, or None where no
document is a commit. Authors are counted where `prepare` kept them or a pseudonym of them (docs/git.md), else unknown.
Cost: some 10 µs and 20 bytes a commit; other documents are passed over without being parsed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.report.fields import line_of, mapping, sequence, whole
from penstock.store import Store

__all__ = ["repository_stats"]

SECONDS_PER_DAY = 86_400
MOST_NAMES = 50
# A fact that commits have and no other document.
MARK = '"author_time"'


def repository_stats(stores: Iterable[Store]) -> dict[str, Any] | None:
    """The figures over all commits, those that were left out of the splits included; a commit counts once."""
    commits: set[str] = set()
    authors: set[str] = set()
    branches: set[str] = set()
    first: datetime.datetime | None = None
    last: datetime.datetime | None = None
    counts = dict.fromkeys(("insertions", "deletions"), 0)
    merges = 0
    for facts in (facts for store in stores for facts in _commits(store)):
        if line_of(facts["commit"]) in commits:
            continue
        commits.add(line_of(facts["commit"]))
        authors |= {line_of(facts["author"])} if "author" in facts else set()
        branches.update(line_of(name) for name in sequence(facts.get("branches")))
        counts = {name: count + (whole(facts.get(name)) or 0) for name, count in counts.items()}
        merges += facts.get("is_merge") is True
        time = _time(facts)
        if time is not None:
            first, last = min(time, first or time), max(time, last or time)
    if not commits:
        return None
    return {
        "unique_commits": len(commits),
        "unique_authors": len(authors) or None,
        "branches": len(branches),
        "branch_names": sorted(branches)[:MOST_NAMES],
        "merges": merges,
        **counts,
        "first_commit": first.isoformat() if first else None,
        "last_commit": last.isoformat() if last else None,
        "time_span_days": round((last - first).total_seconds() / SECONDS_PER_DAY, 3) if first and last else None,
    }


def _time(facts: dict[str, Any]) -> datetime.datetime | None:
    """When the commit was made; None where its clock was beyond what a date can say."""
    try:
        time = datetime.datetime.fromisoformat(line_of(facts.get("time")))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _commits(store: Store) -> Iterator[dict[str, Any]]:
    import pyarrow.compute as pc

    for batch in store.provenance_batches(["facts"]):
        texts = batch["facts"]
        for text in texts.filter(pc.match_substring(texts, MARK)).to_pylist():
            facts = mapping(json.loads(text))
            if "commit" in facts:
                yield facts
