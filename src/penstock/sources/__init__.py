"""Stage 1: bytes -> Document."""

from penstock.sources.document import Document, Part, PartKind, SkipTally, printable
from penstock.sources.files import FileOptions, FilesSource
from penstock.sources.inputs import STANDARD_LIBRARY, sources_from_inputs
from penstock.sources.source import DEFAULT_UNIT_BYTES, Source, Unit, UnitText

__all__ = [
    "DEFAULT_UNIT_BYTES",
    "STANDARD_LIBRARY",
    "Document",
    "FileOptions",
    "FilesSource",
    "Part",
    "PartKind",
    "SkipTally",
    "Source",
    "Unit",
    "UnitText",
    "printable",
    "sources_from_inputs",
]
