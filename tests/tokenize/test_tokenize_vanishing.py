"""Added tokens of which the normalizer leaves nothing: refused, or harmless, before `tokenizers` runs away with memory.

Each tokenizer is tried in a process with little memory and little time, so that a failure ends that process only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, processors
from tokenizers import Tokenizer as Reference

from penstock.tokenize.framed import FIRST_STAND_IN
from penstock.tokenize.vanishing import vanishing_tokens

from .conftest import END

PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30))
from penstock.errors import TokenizerError
from penstock.sources import Document, Part, PartKind
from penstock.tokenize import Tokenizer, TokenizerSpec
source, texts, framed = json.load(sys.stdin)
try:
    tokenizer = Tokenizer(TokenizerSpec.from_json(source.encode(), origin="built here"), origin="built here")
    if framed:
        parts = [Part(kind=PartKind.TEXT, data=text.encode()) for text in texts]
        parts.append(Part(kind=PartKind.CONTROL, data=b"<|endoftext|>"))
        where = {"key": b"k", "group": b"k", "path": b"", "byte_start": 0, "byte_end": 0}
        ids = [tokenizer.encode_document(Document(parts=tuple(parts), framed=True, **where))[0].tolist()]
    else:
        ids = [tokenizer.encode([text.encode()])[0].tolist() for text in texts]
    answer = {"ids": ids, "begin": tokenizer.spec.begin_ids}
except TokenizerError as error:
    answer = {"error": str(error), "hint": error.hint}
json.dump(answer, sys.stdout)
"""


def answer_of(tokenizer: Reference, texts: list[str], *, framed: bool = False) -> dict[str, Any]:
    """What a process with 2 GB says of these texts."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([tokenizer.to_str(), texts, framed]),
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, f"ended with {process.returncode}: {process.stderr[-500:]}"
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def built(normalizer: Any, *added: AddedToken) -> Reference:
    letters = {letter: number for number, letter in enumerate(["[UNK]", *"abcdefgh xyz.", "ab"])}
    tokenizer = Reference(models.BPE(vocab=letters, merges=[("a", "b")], unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.add_tokens(list(added))
    return tokenizer


def normalized(name: str, **flags: Any) -> AddedToken:
    return AddedToken(name, **{"special": False, "normalized": True, **flags})


# The self-check's second text is "a", so a token that begins with one is enough for a search that never ends.
REFUSED: dict[str, tuple[str, Callable[[], Reference]]] = {
    "white space that is stripped": ("\n", lambda: built(normalizers.Strip(), normalized("\n"), normalized("abc"))),
    "the last one": ("\t", lambda: built(normalizers.Strip(), normalized("abc"), normalized("\t"))),
    "whole words only": (
        " ",
        lambda: built(normalizers.Strip(), normalized(" ", single_word=True), normalized("abc", single_word=True)),
    ),
    "a character that BERT drops": (
        "\u200c",
        lambda: built(normalizers.BertNormalizer(), normalized("\u200c"), normalized("abc")),
    ),
    "a pattern that is removed": (
        "<X>",
        lambda: built(normalizers.Replace(Regex("<[A-Z]>"), ""), normalized("<X>"), normalized("abc")),
    ),
    "only ASCII reaches the model": (
        "\n",
        lambda: built(
            normalizers.Sequence([normalizers.Replace(Regex("[^ -~]"), ""), normalizers.Strip()]), normalized("\n")
        ),
    ),
}


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("shape", REFUSED)
def test_a_token_that_would_be_found_everywhere_is_refused_by_name(shape: str, framed: bool):
    name, build = REFUSED[shape]
    tokenizer = build()
    assert vanishing_tokens(tokenizer) == [name]
    answer = answer_of(tokenizer, ["ab", "b xa"], framed=framed)
    assert repr(name) in answer["error"]
    assert "normalized" in answer["hint"]


ALLOWED = {
    "not normalized": lambda: built(normalizers.Strip(), normalized("\n", normalized=False), normalized("abc")),
    "something is left": lambda: built(normalizers.Strip(), normalized("\n."), normalized("abc")),
    "no normalizer": lambda: built(None, normalized("\n"), normalized("abc")),
}


@pytest.mark.parametrize("shape", ALLOWED)
def test_other_tokens_stay(shape: str):
    tokenizer, texts = ALLOWED[shape](), ["ab", "b xa", "xabcx", "a\nb", "\n.", "é"]
    assert vanishing_tokens(tokenizer) == []
    assert answer_of(tokenizer, texts)["ids"] == [tokenizer.encode(text).ids for text in texts]


def test_a_control_may_vanish_because_text_never_meets_it():
    """Nor does the text that shows what is put around documents, nor the documents that hold controls."""
    plain, vanishing = (
        built(normalizers.Strip(), *controls, normalized("abc"))
        for controls in ([], [normalized("\n", special=True, normalized=True)])
    )
    for tokenizer in (plain, vanishing):
        end = tokenizer.token_to_id(END)
        around = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
        tokenizer.post_processor = around
    assert vanishing_tokens(vanishing) == ["\n"]
    without_it = built(normalizers.Strip(), normalized("abc"))
    texts = ["ab", "b xa", "a"]
    expected = [without_it.encode(text).ids for text in texts]
    for tokenizer in (plain, vanishing):
        answer = answer_of(tokenizer, texts)
        assert answer["ids"] == expected
        assert answer["begin"] == [without_it.token_to_id(END)]
        assert answer_of(tokenizer, ["b xa"], framed=True)["ids"] == [[*expected[1], without_it.token_to_id(END)]]


def test_a_stand_in_that_vanishes_is_no_reason_to_refuse():
    """Documents with controls are encoded with private-use characters in their place, which a normalizer may drop."""
    content = json.loads(built(normalizers.BertNormalizer(), normalized("abc")).to_str())
    end, _ = content["added_tokens"]
    end["normalized"] = True
    tokenizer = Reference.from_str(json.dumps(content))
    assert tokenizer.normalizer.normalize_str(chr(FIRST_STAND_IN)) == ""
    expected = [*tokenizer.encode("b xa").ids, tokenizer.token_to_id(END)]
    assert answer_of(tokenizer, ["b xa"], framed=True)["ids"] == [expected]
