"""Documents to ids in store width: each id looked at before it is narrowed, each text with its end behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TokenizerError
from penstock.sources import Part
from penstock.store.encoding import CHECKED_IDS, Room, encode_documents, fill_room
from penstock.tokenize import TokenizerSpec
from penstock.tokenize.engines import Encoded, EngineChoice

from .samples import bytes_tokenizer, document

TOKENIZER = bytes_tokenizer()
LARGEST = TOKENIZER.spec.highest_text_id


def encoded(texts: Sequence[Sequence[int]]) -> Encoded:
    borders = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])
    return np.array([number for text in texts for number in text], np.uint32), borders


@given(st.lists(st.lists(st.integers(0, LARGEST), max_size=9), max_size=9), st.integers(0, 5))
def test_a_filled_room_is_the_texts_with_their_ends(texts: list[list[int]], capacity: int) -> None:
    room = Room(TOKENIZER.dtype)
    room.empty(capacity=capacity)
    assert fill_room(room, TOKENIZER, encoded(texts)) == [len(text) + 1 for text in texts]
    assert room.filled().tolist() == [number for text in texts for number in (*text, TOKENIZER.end_id)]


@pytest.mark.parametrize("bad", [LARGEST + 1, 2**16, 2**16 + 7, 2**32 - 1])
@pytest.mark.parametrize("place", [0, CHECKED_IDS - 1, CHECKED_IDS, 2 * CHECKED_IDS + 1, 3 * CHECKED_IDS - 1])
def test_an_id_that_no_text_has_is_refused_wherever_it_stands(place: int, bad: int) -> None:
    ids = np.zeros(3 * CHECKED_IDS, np.uint32)
    ids[place] = bad
    for cuts in ([], [1], [CHECKED_IDS - 5], [CHECKED_IDS], [5, 2 * CHECKED_IDS + 1], [len(ids) - 1]):
        with pytest.raises(TokenizerError, match=str(bad)):
            fill_room(Room(TOKENIZER.dtype), TOKENIZER, (ids, np.array([0, *cuts, len(ids)])))


class WrappingEngine:
    """Gives one id beyond 16 bits for each byte: narrowed unseen, it would be the byte's own."""

    def __init__(self, spec: TokenizerSpec) -> None:
        pass

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        return encoded([[2**16 + byte for byte in text] for text in texts])


@pytest.mark.parametrize("parts", [("plain",), ("of", "parts")])
def test_an_engine_that_gives_such_ids_stores_nothing(parts: tuple[str, ...]) -> None:
    choice = EngineChoice(name="wrapping", reason="for this test", build=WrappingEngine)  # type: ignore[arg-type]
    made = document("a", *(Part(data=part.encode(), loss=len(parts) == 1) for part in parts))
    with pytest.raises(TokenizerError, match="65"):
        encode_documents(bytes_tokenizer(engine=choice), [made], room=Room(TOKENIZER.dtype))
