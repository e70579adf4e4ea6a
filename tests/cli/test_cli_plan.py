"""`penstock plan` as a user types it: figures that add up, errors with a way out."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("pack", ["concat", "best-fit", "windows", "pad"])
def test_the_figures_add_up(penstock, store_path, pack):
    overlap = ["--overlap", 25] if pack == "windows" else []
    facts = penstock("plan", store_path, "--seq-len", 100, "--pack", pack, *overlap, "--json").json
    assert facts["policy"] == pack
    places = facts["rows"] * 101
    assert places == facts["tokens"] + facts["repeated_tokens"] + facts["waste_tokens"]
    assert 0 < facts["documents_split"] <= facts["documents"]
    shown = penstock("plan", store_path, "--seq-len", 100, "--pack", pack, *overlap).out
    assert pack in shown
    assert f"{facts['rows']:,}" in shown


def test_a_seed_shows_where_its_order_begins(penstock, store_path):
    one, other = (penstock("plan", store_path, "--seq-len", 50, "--seed", seed, "--json").json for seed in (1, 2))
    assert one["first_rows"] != other["first_rows"]
    assert len(set(one["first_rows"])) == min(8, one["rows"])


@pytest.mark.parametrize(
    "options",
    [
        ["--pack", "bestfit"],
        ["--pack", "best-fit", "--overlap", 5],
        ["--pack", "windows", "--overlap", 100],
        ["--pack", "windows", "--overlap", -1],
        ["--pack", "pad", "--overlap-loss"],
        ["--pack", "pad", "--split", "nowhere"],
    ],
)
def test_what_cannot_be_planned_is_one_error(penstock, store_path, options):
    penstock("plan", store_path, "--seq-len", 100, *options, expect=1).assert_one_error()


def test_the_order_of_a_seed_by_name(penstock, store_path):
    command = ["plan", store_path, "--seq-len", 50, "--pack", "pad", "--seed", 1]
    assert penstock(*command, "--order", "sequential", "--json").json["first_rows"] == list(range(8))
    shown = penstock(*command, "--order", "curriculum").out
    assert "curriculum, seed 1 begins with" in shown
    one, usual = (penstock(*command, "--order", "segments", *more).out for more in (["--window-segments", 1], []))
    assert "segments, seed 1 begins with" in one
    assert one != usual
    penstock(*command, "--window-segments", 1, expect=1).assert_one_error()
    penstock("plan", store_path, "--order", "curriculum", expect=1).assert_one_error()
    penstock(*command, "--order", "backwards", expect=1).assert_one_error()
