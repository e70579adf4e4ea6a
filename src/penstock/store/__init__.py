"""Stage 3: ids <-> disk."""

from penstock.store.preparation import PrepareResult, estimate_store, prepare
from penstock.store.prepare_options import PrepareOptions
from penstock.store.provenance import document_origin, document_text, summary, token_origin
from penstock.store.reader import Store, list_versions, open_store
from penstock.store.removal import prune, remove
from penstock.store.verification import Problem, verify

__all__ = [
    "PrepareOptions",
    "PrepareResult",
    "Problem",
    "Store",
    "document_origin",
    "document_text",
    "estimate_store",
    "list_versions",
    "open_store",
    "prepare",
    "prune",
    "remove",
    "summary",
    "token_origin",
    "verify",
]
