"""The optional C extension: what `prepare` does for every document, at the pace of the encoder.

`native` is the module `penstock._native`, or None where it wasn't built (no compiler, not Linux) or where
PENSTOCK_NATIVE=off says not to use it. Each function has a twin in Python, which is the one that says what is right:

    read_text       sources.files, a file that is as the walk saw it
    list_folder     sources.files, the entries of a folder and their facts
    text_problem    sources.hygiene.content, whether bytes are text
    literals, hits  sources.hygiene.secrets, where literals of the rules are met
    look            sources.hygiene.marks, which rules needn't read a document at all
    line_facts      sources.hygiene.content, what tells minified code by its lines
    place           store.encoding, ids narrowed to the store's width with begin and end tokens between

The same input gives the same store with and without it (tests/test_native.py); without it `prepare` takes longer
(docs/adr/0013-native.md).
"""

from __future__ import annotations

import os
from types import ModuleType

__all__ = ["native"]

native: ModuleType | None = None
if os.environ.get("PENSTOCK_NATIVE", "") != "off":
    try:
        from penstock import _native as native
    except ImportError:
        native = None
