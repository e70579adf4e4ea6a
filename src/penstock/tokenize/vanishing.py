"""Added tokens of which the normalizer leaves nothing, and with which `tokenizers` may never come to an end.

In: a tokenizer as `tokenizers` has loaded it. Out: the added tokens that it would look for as an empty text. An added
token that is `normalized` is looked for by its normalized text; where that is empty (`"\\n"` behind `Strip`, a
zero-width character behind BERT's normalizer) it is found at every byte. Words then fall apart into letters, text that
isn't ASCII makes the library panic, and a text that ends inside another such token (`"ab"` of `"abc"`) is searched for
ever: at a gigabyte of memory a second, or with `single_word` without a sign. A text of one character is enough, so a
tokenizer is asked before it sees any. Costs 2 to 5 µs for each added token, nothing without a normalizer.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import TokenizerError

__all__ = ["refuse_vanishing_tokens", "vanishing_tokens"]


def vanishing_tokens(loaded: Any) -> list[str]:
    """The added tokens of a `tokenizers.Tokenizer` that it would find between any two bytes."""
    normalizer = loaded.normalizer
    if normalizer is None:
        return []
    added = loaded.get_added_tokens_decoder().values()
    return [token.content for token in added if token.normalized and not normalizer.normalize_str(token.content)]


def refuse_vanishing_tokens(loaded: Any) -> None:
    """Lets a `tokenizers.Tokenizer` pass that has none.

    Raises:
        TokenizerError: it has one.
    """
    names = vanishing_tokens(loaded)
    if names:
        raise TokenizerError(
            f"the normalizer leaves nothing of the added tokens {', '.join(map(repr, names[:8]))}: tokenizers finds"
            " them between any two bytes, and on some texts never ends",
            hint='set "normalized" to false for them in tokenizer.json, or remove them',
        )
