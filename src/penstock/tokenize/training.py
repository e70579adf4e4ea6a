"""A vocabulary trained on the corpus itself: the embedded default.

In: documents' bytes. Out: a byte-level BPE tokenizer.json with GPT-2's split pattern and one control token,
`<|endoftext|>`. gigatoken trains 8,192 tokens on 31 MB of Python's library in about a second; it prints its progress to
the terminal from native code, so it runs in a process of its own whose output is kept from the user's pipes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from penstock import fs
from penstock.engines import die_with
from penstock.errors import TokenizerError
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import TokenizerSpec, character_of_byte
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["DEFAULT_VOCAB_SIZE", "TRAINING_SAMPLE_BYTES", "train_tokenizer"]

DEFAULT_VOCAB_SIZE = 8192
TRAINING_SAMPLE_BYTES = 64 * 2**20
SMALLEST_VOCAB_SIZE = 256 + 1
END_TOKEN = "<|endoftext|>"  # noqa: S105  a vocabulary entry, not a password


def train_tokenizer(
    texts: Iterable[bytes],
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    control_tokens: Sequence[str] = (),
    end_token: str = END_TOKEN,
    sample_bytes: int = TRAINING_SAMPLE_BYTES,
) -> Tokenizer:
    """Trains on the texts in the order given, up to `sample_bytes`.

    Args:
        texts: documents; pass them in a canonical order to get the same vocabulary everywhere.
        vocab_size: ids in all, the 256 bytes, the end token and `control_tokens` included.
        control_tokens: further tokens that text can't reach, for templates; they take the highest ids.
        end_token: name of the token put after each document.
        sample_bytes: texts beyond so many bytes aren't read.
    """
    controls = [name for name in dict.fromkeys(control_tokens) if name != end_token]
    if not all([end_token, *controls]):
        raise TokenizerError("a control token without a name", hint="name each, for instance '<|end|>'")
    smallest = SMALLEST_VOCAB_SIZE + len(controls)
    if vocab_size < smallest:
        raise TokenizerError(
            f"a byte-level vocabulary of {vocab_size} is too small", hint=f"ask for at least {smallest}"
        )
    source = _trained(texts, vocab_size - len(controls), sample_bytes)
    source = _with_controls(source, controls, end_token=end_token)
    spec = TokenizerSpec.from_json(source, origin="the trained vocabulary", end_token=end_token)
    # The size that it got: a small corpus has no more pairs to merge.
    return Tokenizer(spec, origin=f"trained, {spec.vocab_size} tokens")


def _trained(texts: Iterable[bytes], vocab_size: int, sample_bytes: int) -> bytes:
    """The tokenizer.json of a vocabulary, from a process of its own. Its files have no names: a kill leaves none."""
    with (
        fs.fail_as_disk_error(f"writing a sample of the texts to {tempfile.gettempdir()}"),
        tempfile.TemporaryFile() as corpus,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as words,
    ):
        written = 0
        for text in texts:
            # A text that spells the separator would be cut there; harmless for counting, but kept out all the same.
            corpus.write(text.replace(END_TOKEN.encode(), b" ") + END_TOKEN.encode())
            written += len(text)
            if written >= sample_bytes:
                break
        corpus.seek(0)
        # -P keeps the working folder off the import path: it may be the scraped repository that is being read.
        command = [sys.executable, "-P", "-m", "penstock.tokenize.training", str(vocab_size), str(os.getpid())]
        finished = subprocess.run(command, stdin=corpus, stdout=output, stderr=words, check=False)
        output.seek(0)
        source = output.read()
        if finished.returncode != 0 or not source:
            words.seek(0)
            last_line = (words.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise TokenizerError(
                f"training a vocabulary of {vocab_size} failed: {last_line}",
                hint="the corpus may be too small for that size; ask for fewer tokens or give --tokenizer",
            )
    return source


def _with_controls(source: bytes, controls: Sequence[str], *, end_token: str) -> bytes:
    """A trained tokenizer.json with its end token's name and further control tokens at its end."""
    if not controls and end_token == END_TOKEN:
        return source
    content = json.loads(source)
    added = content["added_tokens"]
    added[0]["content"] = end_token
    first = 1 + max(token["id"] for token in added)
    added += [{**added[0], "id": first + number, "content": name} for number, name in enumerate(controls)]
    return json.dumps(content, ensure_ascii=False).encode()


def _train(corpus: bytes, vocab_size: int) -> bytes:
    """The trainer proper; runs in the child process."""
    from gigatoken import train_bpe

    separator = END_TOKEN.encode()
    vocabulary, merges = train_bpe(corpus, vocab_size, [END_TOKEN], separator=separator)
    spelt = {number: "".join(character_of_byte[byte] for byte in token) for number, token in vocabulary.items()}
    end_id = next(number for number, token in vocabulary.items() if token == separator)
    del spelt[end_id]  # a control token lives outside the model, where merges can't reach it
    pairs = [
        ("".join(character_of_byte[b] for b in left), "".join(character_of_byte[b] for b in right))
        for left, right in merges
    ]
    # gigatoken puts the end token between the bytes and the merges, and where a small corpus has no more pairs it gives
    # some merges, and their tokens, twice. Ids must stay dense: `tokenizers` numbers added tokens on from how many
    # others there are, whatever the file says.
    ordered = dict.fromkeys(spelt[number] for number in sorted(spelt))
    model_vocabulary = {token: number for number, token in enumerate(ordered)}
    return byte_level_json(
        model_vocabulary, list(dict.fromkeys(pairs)), {END_TOKEN: len(ordered)}, pattern=GPT2_PATTERN
    )


def _main(vocab_size: int, parent: int) -> None:
    """The child process: sample on stdin, tokenizer.json on stdout."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    answer = os.dup(1)
    os.dup2(2, 1)  # where the trainer's progress goes
    source = memoryview(_train(sys.stdin.buffer.read(), vocab_size))
    while source:
        source = source[os.write(answer, source) :]


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
