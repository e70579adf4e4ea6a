"""The config's packing reaches the rows that are trained on."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from penstock.errors import ConfigError
from penstock.train.config import load_config
from penstock.train.start import training_plan


@pytest.mark.parametrize("pack", ["concat", "best-fit", "windows", "pad"])
def test_the_plan_is_the_one_asked_for(store, pack: str) -> None:
    extra = ["overlap=16", "overlap_loss=true"] if pack == "windows" else []
    config = load_config(None, [f"pack={pack}", "seq_len=64", "document_boundaries=false", *extra])
    identity = training_plan(config, store, split="val").identity
    assert (identity["policy"], identity["split"], identity["seq_len"]) == (pack, "val", 64)
    assert identity["boundaries"] is False
    if pack == "windows":
        assert (identity["overlap"], identity["overlap_loss"]) == (16, True)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["pack=bestfit"], "best-fit"),
        (["overlap=3"], "overlap"),
        (["pack=pad", "overlap_loss=true"], "overlap_loss"),
        (["pack=windows", "seq_len=8", "overlap=8"], "seq_len"),
        (["pack=windows", "overlap=-1"], "overlap"),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused(settings: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config(None, settings)
