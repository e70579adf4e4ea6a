"""Stage 1: bytes -> Document."""

from penstock.sources.document import Document, Part, PartKind, SkipTally, printable
from penstock.sources.files import FileOptions, FilesSource, leave_alone
from penstock.sources.git import GitOptions, GitSource
from penstock.sources.inputs import STANDARD_LIBRARY, InputOptions, sources_from_inputs
from penstock.sources.nothing_found import nothing_found
from penstock.sources.records.templates import TemplateRenderer, TemplateVocabulary
from penstock.sources.rows import BadRowError, RowRenderer, TextColumn
from penstock.sources.source import DEFAULT_UNIT_BYTES, Source, Unit, UnitText, closing_all
from penstock.sources.tables import TableOptions, TablesSource

__all__ = [
    "DEFAULT_UNIT_BYTES",
    "STANDARD_LIBRARY",
    "BadRowError",
    "Document",
    "FileOptions",
    "FilesSource",
    "GitOptions",
    "GitSource",
    "InputOptions",
    "Part",
    "PartKind",
    "RowRenderer",
    "SkipTally",
    "Source",
    "TableOptions",
    "TablesSource",
    "TemplateRenderer",
    "TemplateVocabulary",
    "TextColumn",
    "Unit",
    "UnitText",
    "closing_all",
    "leave_alone",
    "nothing_found",
    "printable",
    "sources_from_inputs",
]
