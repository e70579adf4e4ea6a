"""Hashes never change: stores made today are checked with them in years. So their values are written down here."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hashing import (
    STRONG_HASH_BYTES,
    TOKEN_HASH_BYTES,
    canonical_json,
    checksum,
    checksum_hex,
    digest_of,
    strong_hash,
    token_hash,
)

# The input of the official BLAKE3 vectors: bytes 0, 1, 2 … 250, 0, 1 …
VECTOR = bytes(i % 251 for i in range(1024))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def reordered(value: object, shuffle: random.Random) -> object:
    """The same JSON value with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        shuffle.shuffle(keys)
        return {key: reordered(value[key], shuffle) for key in keys}
    return [reordered(item, shuffle) for item in value] if isinstance(value, list) else value


def test_golden_hashes():
    # BLAKE3's test_vectors.json, lengths 0 and 1024; xxHash's own sanity values for the empty input.
    assert strong_hash(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert strong_hash(VECTOR).hex() == "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"
    assert checksum_hex(b"") == "2d06800538d394c2"
    assert token_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum_hex(VECTOR) == "e5d78bafa45b2aa5"
    assert token_hash(VECTOR).hex() == "d0ac1f7b93bf57b9e5d78bafa45b2aa5"
    assert (len(strong_hash(VECTOR)), len(token_hash(VECTOR))) == (STRONG_HASH_BYTES, TOKEN_HASH_BYTES)


def test_golden_canonical_form():
    value = {"z": [1, 2.5, True, None, 1e300], "a": {"é": "ß\n", "b": "日"}, "": -0.0}
    assert canonical_json(value) == '{"":-0.0,"a":{"b":"日","é":"ß\\n"},"z":[1,2.5,true,null,1e+300]}'.encode()
    assert digest_of(value) == "1a8a15b56b7b50a83f4c55d53c86093bdff8d9c346be2b21ee744064f6d65fb5"
    assert digest_of({}) == strong_hash(b"{}").hex()


@given(value=json_values, seed=st.integers(0, 1000))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value, seed):
    assert canonical_json(reordered(value, random.Random(seed))) == canonical_json(value)
    assert json.loads(canonical_json(value)) == value


def test_order_in_lists_and_kinds_of_values_matter():
    different = [[1, 2], [2, 1], ["1", 2], [1.0, 2], [True, 2], [[1], 2], {"1": 2}, "[1,2]", None]
    assert len({digest_of(value) for value in different}) == len(different)


def test_a_file_name_that_is_not_utf8_has_a_digest_of_its_own():
    names = [raw.decode("utf-8", "surrogateescape") for raw in (b"a\xff", b"a\xfe", "aÿ".encode())]
    assert len({digest_of(name) for name in names}) == 3
    assert [json.loads(canonical_json(name)) for name in names] == names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(value)


@pytest.mark.parametrize("size", [1, 3, 8, 16, 129, 241, 512])  # each takes another path inside XXH3
def test_every_single_bit_flip_changes_every_hash(size):
    data = random.Random(size).randbytes(size)
    for hashed in (checksum, token_hash, strong_hash):
        met = {hashed(data)}
        for bit in range(size * 8):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            met.add(hashed(bytes(flipped)))
        assert len(met) == size * 8 + 1


@given(st.binary(max_size=300))
def test_any_buffer_with_the_same_bytes_has_the_same_hash(data):
    array = np.frombuffer(data, np.uint8)
    for hashed in (checksum, checksum_hex, token_hash, strong_hash):
        assert hashed(data) == hashed(bytearray(data)) == hashed(memoryview(data))
    assert checksum(array) == checksum(data)
    assert token_hash(array) == token_hash(data)
    assert int(checksum_hex(data), 16) == checksum(data)
    assert len(checksum_hex(data)) == 16
