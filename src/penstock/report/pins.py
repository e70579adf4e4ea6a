"""Which runs need which versions of a store, so that `prune` doesn't take a version from a run that can go on.

In: a store and a folder of runs. Out: the runs with checkpoints whose records name a version of that store, by number
and digest; the store may have moved since. Only records are read, one run at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DamagedStoreError, InputError
from penstock.report.steps import trained_on
from penstock.runlog import RECORDS_NAME, read_records
from penstock.store.reader import list_versions, read_manifest

__all__ = ["Pins", "runs_that_need"]


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Runs that need versions.

    Attributes:
        runs: (run's folder, version), in order of folder.
        unreadable: folders of runs whose records are damaged: nobody knows what these need.
    """

    runs: list[tuple[Path, int]]
    unreadable: list[Path]


def runs_that_need(versions: Sequence[int], store: Path, *, runs: Path) -> Pins:
    """The runs below a folder that couldn't go on without these versions of a store.

    A run goes on with any version of the digest that it was trained on, so one that stays under another number serves.
    Of a version whose manifest is damaged nobody knows the digest: it is needed by runs that name this store's folder.
    """
    digests = _digests(store)
    damaged = set(versions) - digests.keys()
    staying = {digest for version, digest in digests.items() if version not in versions}
    needed = {(version, digests[version]) for version in versions if digests.get(version, "") not in {*staying, ""}}
    found = Pins(runs=[], unreadable=[])
    if not needed and not damaged:
        return found
    for folder in sorted(path.parent for path in runs.glob(f"*/{RECORDS_NAME}")):
        if not (folder / "checkpoints").is_dir():
            continue  # nothing to go on from
        try:
            facts = trained_on(read_records(folder))
        except InputError:
            found.unreadable.append(folder)
            continue
        stores = facts.stores if facts is not None else ()
        pinned = {version for version, _ in needed & {(one.version, one.digest) for one in stores}}
        pinned |= damaged & {one.version for one in stores if Path(one.store).resolve() == store.resolve()}
        found.runs.extend((folder, version) for version in sorted(pinned))
    return found


def _digests(store: Path) -> dict[int, str]:
    """Of the versions whose manifests are whole."""
    digests = {}
    for version in list_versions(store):
        with contextlib.suppress(DamagedStoreError):
            digests[version] = read_manifest(store, version).digest
    return digests
