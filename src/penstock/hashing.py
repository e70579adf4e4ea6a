"""The two hashes of the project, and the canonical form of a record.

`strong_hash` (BLAKE3, 32 bytes) names things: contents, tokenizers, stores. Nobody can make two different things
agree. `checksum` (XXH3, 8 bytes) finds accidents: torn blocks, flipped bits. Measured on one core of the build machine:
BLAKE3 2.4-3.5 GB/s, XXH3 12-16 GB/s, hashlib's SHA-256 1.5 GB/s, BLAKE2b 0.6 GB/s (docs/adr/0004-hashes.md).
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest, xxh3_128, xxh3_128_digest

STRONG_HASH_BYTES = 32
TOKEN_HASH_BYTES = 16

__all__ = [
    "RunningChecksum",
    "RunningStrongHash",
    "RunningTokenHash",
    "canonical_json",
    "checksum",
    "checksum_hex",
    "digest_of",
    "strong_hash",
    "token_hash",
]

Buffer = bytes | bytearray | memoryview


def strong_hash(data: Buffer, *, purpose: str | None = None) -> bytes:
    """32 bytes that identify `data`; with a `purpose`, never equal to those of another purpose or of none."""
    return blake3(data, derive_key_context=purpose).digest() if purpose else blake3(data).digest()


class RunningStrongHash:
    """`strong_hash` of something that passes in pieces."""

    def __init__(self) -> None:
        self._state = blake3()

    def update(self, data: Buffer) -> None:
        """Takes the next piece."""
        self._state.update(data)

    def digest(self) -> bytes:
        """The hash of all pieces so far."""
        return self._state.digest()


def checksum(data: Any) -> int:
    """64 bits that reveal accidental damage; takes anything with a contiguous buffer."""
    return xxh3_64_intdigest(data)


def checksum_hex(data: Any) -> str:
    """`checksum` as 16 hexadecimal digits, for manifests."""
    return xxh3_64_hexdigest(data)


class RunningChecksum:
    """`checksum_hex` of something that passes in pieces."""

    def __init__(self) -> None:
        self._state = xxh3_64()

    def update(self, data: Any) -> None:
        """Takes the next piece."""
        self._state.update(data)

    def hex(self) -> str:
        """The checksum of all pieces so far."""
        return self._state.hexdigest()


def token_hash(data: Any) -> bytes:
    """16 bytes over one document's stored tokens.

    Tokens follow from content and tokenizer, which carry strong hashes, so this one only has to find damage.
    """
    return xxh3_128_digest(data)


class RunningTokenHash:
    """`token_hash` of something that passes in pieces."""

    def __init__(self) -> None:
        self._state = xxh3_128()

    def update(self, data: Any) -> None:
        """Takes the next piece."""
        self._state.update(data)

    def digest(self) -> bytes:
        """The hash of all pieces so far."""
        return self._state.digest()


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, UTF-8.

    NaN and infinities aren't JSON: `ValueError`. File names that aren't UTF-8 reach Python as lone surrogates; they are
    passed through, so that every name has a digest and `json.loads` gives it back.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def digest_of(value: Any) -> str:
    """Hexadecimal strong hash of a JSON value."""
    return strong_hash(canonical_json(value)).hex()
