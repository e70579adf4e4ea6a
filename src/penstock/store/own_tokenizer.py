"""The tokenizer of a store for which none is named: its own copy, or one that is trained on its input.

In: the store's folder, the sources. Out: a tokenizer. Training reads a sample that depends on documents' keys alone, so
that units and workers leave no trace in the vocabulary. Memory: the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import DamagedStoreError, TokenizerError
from penstock.hashing import strong_hash
from penstock.sources import PartKind, Source, nothing_found
from penstock.store.commit import write_tokenizer
from penstock.store.layout import TOKENIZERS, file_entry
from penstock.store.prepare_options import PrepareOptions
from penstock.store.reader import list_versions, open_store, read_manifest
from penstock.tokenize import TRAINING_SAMPLE_BYTES, Tokenizer, train_tokenizer
from penstock.tokenize.training import END_TOKEN

__all__ = ["default_tokenizer", "mend_tokenizer"]


def default_tokenizer(out: Path, sources: Sequence[Source], options: PrepareOptions) -> Tokenizer:
    """The existing store's own tokenizer, or one trained on a sample of the sources that doesn't depend on units."""
    if list_versions(out):
        return _stored_tokenizer(out, end_token=options.end_token)
    units = [unit for source in sources for unit in source.units(options.unit_bytes)]
    if not any(unit.items for unit in units):
        raise nothing_found(sources, [unit.skips for unit in units])
    total = sum(unit.input_bytes for unit in units)
    limit = min(1.0, TRAINING_SAMPLE_BYTES / max(total, 1)) * 2**64

    def wanted(key: bytes) -> bool:
        return int.from_bytes(strong_hash(b"vocabulary " + key)[:8], "little") < limit

    texts = (
        part.data
        for source in sorted(sources, key=lambda source: source.name)
        for unit in units
        if unit.source == source.name
        for document in source.read(unit, wanted=wanted).documents
        for part in document.parts
        if part.kind is PartKind.TEXT
    )
    return train_tokenizer(
        texts,
        vocab_size=options.vocab_size,
        control_tokens=options.control_tokens,
        end_token=END_TOKEN if options.end_token is None else options.end_token,
    )


def _stored_tokenizer(out: Path, *, end_token: str | None) -> Tokenizer:
    try:
        with open_store(out) as store:
            tokenizer = store.tokenizer()
    except DamagedStoreError as error:
        hint = "name the tokenizer of which the store has a copy, with --tokenizer: that mends a damaged copy"
        is_copy = "/" + TOKENIZERS + "/" in error.message
        raise DamagedStoreError(error.message, hint=hint if is_copy else error.hint) from error
    own = next(name for name, token in tokenizer.spec.control_tokens.items() if token == tokenizer.spec.end_id)
    if end_token not in (None, own):
        raise TokenizerError(
            f"--end-token is {end_token!r}, and documents of {str(out)!r} end with {own!r}",
            hint="leave it out, choose another --out, or name a --tokenizer that has it",
        )
    return tokenizer


def mend_tokenizer(out: Path, version: int, tokenizer: Tokenizer) -> None:
    """Writes a version's copy of the tokenizer again where that is damaged and this one is of the same file."""
    source_json, copy = tokenizer.spec.source_json, read_manifest(out, version).tokenizer_file
    if file_entry(copy.name, source_json) == copy:
        write_tokenizer(out, source_json)
