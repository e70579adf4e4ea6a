"""What to say where inputs give no document at all: what was met, and the option or the place that changes it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InputError
from penstock.sources.document import SkipTally
from penstock.sources.source import Source

__all__ = ["nothing_found"]

# For which nothing is read whatever the options.
NO_OPTION_REASONS = {"symlink", "special", "unreadable", "empty", "binary", "not-utf8", "damaged", "truncated"}
NO_OPTION_REASONS |= {"broken-json", "broken-row", "damaged-stream", "not-an-object", "not-a-table"}
OPTION_OF_REASON = {
    "excluded": "--exclude",
    "generated": "--generated",
    "hidden": "--hidden",
    "minified": "--minified",
    "no-group": "--group-field",
    "no-id": "--id-field",
    "no-record": "--field-map",
    "no-text": "--text-field",
    "not-included": "--include",
    "secret": "--secrets",
    "too-large": "--max-file-bytes",
    "too-short": "--min-bytes",
    "vendored": "--vendored",
}
# By kind of source: what isn't there if there is nothing, and where to look.
NOTHING_IN = {
    "files": ("files", "check the path, or name a folder that holds text or code"),
    "tables": ("rows", "check that this is the table you mean, and whole"),
    "git": ("commits or files", "check --git-since and --git-parts"),
}


def nothing_found(sources: Sequence[Source], skips: Sequence[SkipTally]) -> InputError:
    """The error to raise, from what the sources left out."""
    tally = SkipTally()
    tally.merge(skips)
    where = ", ".join(source.location for source in sources)
    if not tally.total:
        nothing, hint = NOTHING_IN.get(sources[0].options().get("kind", ""), NOTHING_IN["files"])
        return InputError(f"no {nothing} in {where}", hint=hint)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.counts.items()))
    options = [OPTION_OF_REASON[reason] for reason in sorted(tally.counts) if reason in OPTION_OF_REASON]
    hint = "docs/hygiene.md, docs/tables.md and docs/records.md say what each reason means"
    if options:
        hint = f"what left them out can be changed: {', '.join(options)}"
    elif set(tally.counts) <= NO_OPTION_REASONS:
        hint = "nothing there could be read as text; check that these are the files you mean"
    return InputError(f"no documents in {where}: {tally.total} left out ({reasons})", hint=hint)
