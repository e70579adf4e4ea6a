"""A file's language by its ending; which languages are code."""

from __future__ import annotations

__all__ = ["CODE_LANGUAGES", "LANGUAGES", "language_of"]

LANGUAGES = {
    language: extensions.split()
    for language, extensions in {
        "c": "c h", "c++": "cc cpp cxx hh hpp hxx", "c#": "cs", "css": "css scss less", "go": "go", "html": "html htm",
        "java": "java", "javascript": "js jsx mjs cjs", "json": "json", "kotlin": "kt kts", "lua": "lua",
        "markdown": "md markdown", "perl": "pl pm", "php": "php", "python": "py pyi pyx", "r": "r",
        "restructuredtext": "rst", "ruby": "rb", "rust": "rs", "scala": "scala", "shell": "sh bash zsh", "sql": "sql",
        "swift": "swift",
        "text": "txt", "toml": "toml", "typescript": "ts tsx", "xml": "xml", "yaml": "yaml yml",
    }.items()
}  # fmt: skip
_LANGUAGE_BY_EXTENSION = {
    extension.encode(): language for language, extensions in LANGUAGES.items() for extension in extensions
}
CODE_LANGUAGES = frozenset(LANGUAGES) - {
    "html", "json", "markdown", "restructuredtext", "text", "toml", "xml", "yaml",
}  # fmt: skip
"""Written by people to be run. A data format with long lines, or one that a program wrote, is as it should be."""


def language_of(path: bytes) -> str:
    """The language by file ending, or the empty string."""
    # An ending with a slash in it, of a dot in a folder's name, is in no table.
    _, dot, ending = path.rpartition(b".")
    return _LANGUAGE_BY_EXTENSION.get(ending.lower(), "") if dot else ""
