"""How units of work are run. An engine knows nothing of documents or stores: it calls three functions per unit."""

from penstock.engines.local import run_units

__all__ = ["run_units"]
