"""What can be asked of an export, checked before anything is written.

`ExportOptions` comes in as the user wrote it; `checked` gives it back with the defaults of the format filled in, or
raises with the value met and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.errors import ConfigError, nearest_first
from penstock.pack import POLICIES

__all__ = ["CHUNK_FORMATS", "COMPRESSIONS", "FORMATS", "ExportOptions", "checked"]

FORMATS = ("jsonl", "arrow", "chunks", "megatron", "bin")
ROW_FORMATS = ("jsonl", "arrow", "chunks")
CHUNK_FORMATS = ("safetensors", "npy", "pt")
COMPRESSIONS = ("gz", "zst")

DEFAULT_CHUNK_TOKENS = 32_768
# Large enough that a corpus is hundreds of files, not hundreds of thousands; a chunk file is held in memory once.
DEFAULT_SHARD_BYTES = {"chunks": 128 * 2**20, "arrow": 512 * 2**20}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to write an export.

    Attributes:
        format: one of `FORMATS`.
        split: the only split to write; None for all, each to an output of its own.
        seq_len: tokens per row; None for whole documents (`chunks` is always rows: 32,768).
        pack: how rows are made, one of `penstock.pack.POLICIES`.
        overlap: tokens that a row repeats from the one before, as context without loss; of `concat` and `windows`.
        boundaries: whether the first token of a document counts as a label of the one before it (Arrow rows).
        chunk_format: file format of `chunks`.
        compress: `gz` or `zst`, of JSONL.
        text: whether JSONL has the decoded text too.
        shard_bytes: about the largest file of `chunks` and `arrow`; None for the format's own.
    """

    format: str
    split: str | None = None
    seq_len: int | None = None
    pack: str = "concat"
    overlap: int = 0
    boundaries: bool = True
    chunk_format: str = "safetensors"
    compress: str | None = None
    text: bool = False
    shard_bytes: int | None = None


def checked(options: ExportOptions) -> ExportOptions:
    """The options with the format's defaults.

    Raises:
        ConfigError: a name is unknown, a number is impossible, or an option isn't one of this format's.
    """
    for name, value, known in (
        ("--format", options.format, FORMATS),
        ("--pack", options.pack, POLICIES),
        ("--chunk-format", options.chunk_format, CHUNK_FORMATS),
        ("--compress", options.compress or COMPRESSIONS[0], COMPRESSIONS),
    ):
        if value not in known:
            raise ConfigError(f"{name} {value!r} isn't known", hint=f"known: {nearest_first(value, known)}")
    _refuse_strangers(options)
    if options.format == "chunks" and options.seq_len is None:
        options = replace(options, seq_len=DEFAULT_CHUNK_TOKENS)
    _check_rows(options)
    if options.shard_bytes is not None and options.shard_bytes < 1:
        raise ConfigError(f"files of {options.shard_bytes} bytes are impossible", hint="--shard-bytes must be positive")
    return replace(options, shard_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES.get(options.format))


def _refuse_strangers(options: ExportOptions) -> None:
    """An option that would do nothing is refused, not dropped."""
    defaults = ExportOptions(format=options.format)
    homes = {
        "seq_len": ROW_FORMATS,
        "pack": ROW_FORMATS,
        "overlap": ROW_FORMATS,
        "boundaries": ("arrow",),
        "chunk_format": ("chunks",),
        "compress": ("jsonl",),
        "text": ("jsonl",),
        "shard_bytes": tuple(DEFAULT_SHARD_BYTES),
    }
    for name, formats in homes.items():
        if getattr(options, name) != getattr(defaults, name) and options.format not in formats:
            spelt = "--cross-boundaries" if name == "boundaries" else "--" + name.replace("_", "-")
            raise ConfigError(
                f"{spelt} does nothing in the format {options.format!r}",
                hint=f"leave it out, or choose --format {' or '.join(formats)}",
            )


def _check_rows(options: ExportOptions) -> None:
    if options.seq_len is None:
        if options.overlap or not options.boundaries or options.pack != "concat":
            name = "--pack" if options.pack != "concat" else "--overlap" if options.overlap else "--cross-boundaries"
            raise ConfigError(f"{name} is about rows, and no row length is given", hint="add --seq-len")
        return
    if options.seq_len < 2:
        raise ConfigError(
            f"a row of {options.seq_len} tokens has nothing to learn from", hint="--seq-len must be 2 or more"
        )
    if options.overlap and options.pack not in ("concat", "windows"):
        raise ConfigError(
            f"--overlap {options.overlap} does nothing with --pack {options.pack}",
            hint="leave it out, or use --pack windows",
        )
    if not 0 <= options.overlap < options.seq_len:
        raise ConfigError(
            f"rows of {options.seq_len} tokens can't overlap by {options.overlap}",
            hint=f"--overlap must be from 0 to {options.seq_len - 1}",
        )
