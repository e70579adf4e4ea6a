"""Names made safe to print, and the tally of what was left out."""

from __future__ import annotations

import itertools
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sources import Document, Part, PartKind, SkipTally, printable
from penstock.sources.document import EXAMPLES_PER_REASON


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_nothing_that_moves_a_cursor_comes_out_of_printable(name: bytes):
    shown = printable(name)
    # Cc controls, Cf bidi marks and joiners, Cs surrogates, Zl and Zp line ends.
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(shown.splitlines()) <= 1
    assert shown.encode().decode() == shown


@settings(deadline=None)
@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=40))
def test_printable_names_are_shown_as_they_are(name: str):
    if name.isprintable():
        assert printable(name.encode()) == name


def test_printable_shows_what_was_there():
    assert printable(b"a\nb") == "a\\nb"
    assert printable(b"\x1b[31m") == "\\x1b[31m"
    assert printable(b"\xffx") == "\\xffx"
    assert printable("\u202egnp.exe".encode()) == "\\u202egnp.exe"


def test_plain_means_one_text_part_with_loss():
    def is_plain(*parts: Part) -> bool:
        return Document(key=b"k", group=b"k", path=b"k", byte_start=0, byte_end=1, parts=parts).is_plain

    assert is_plain(Part(data=b"x"))
    assert not is_plain()
    assert not is_plain(Part(data=b"x"), Part(data=b"y"))
    assert not is_plain(Part(data=b"x", loss=False))
    assert not is_plain(Part(data=b"x", kind=PartKind.CONTROL))


entries = st.lists(st.tuples(st.sampled_from(["empty", "binary", "symlink"]), st.binary(max_size=4)), max_size=40)


@settings(deadline=None)
@given(entries=entries, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_merged_tallies_equal_one_tally_wherever_the_units_are_cut(entries: list[tuple[str, bytes]], cuts: list[int]):
    whole = SkipTally()
    for reason, key in entries:
        whole.add(reason, key)
    borders = [0, *sorted(min(cut, len(entries)) for cut in cuts), len(entries)]
    pieces = []
    for start, end in itertools.pairwise(borders):
        piece = SkipTally()
        for reason, key in entries[start:end]:
            piece.add(reason, key)
        pieces.append(piece)
    merged = SkipTally()
    merged.merge(pieces)
    assert (merged.counts, merged.examples, merged.total) == (whole.counts, whole.examples, len(entries))
    assert all(len(shown) <= EXAMPLES_PER_REASON for shown in merged.examples.values())


def test_a_tally_keeps_the_first_examples_in_order_and_counts_all():
    tally = SkipTally()
    for number in range(20):
        tally.add("empty", b"file-%d" % number)
    assert tally.counts == {"empty": 20}
    assert tally.examples == {"empty": [f"file-{number}" for number in range(EXAMPLES_PER_REASON)]}


def test_merging_leaves_the_merged_tallies_alone():
    first, second, merged = SkipTally(), SkipTally(), SkipTally()
    first.add("empty", b"a")
    second.add("empty", b"b")
    merged.merge([first, second])
    merged.add("empty", b"c")
    assert merged.examples == {"empty": ["a", "b", "c"]}
    assert (first.examples, second.examples) == ({"empty": ["a"]}, {"empty": ["b"]})
