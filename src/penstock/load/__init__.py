"""Stage 5: plan -> batches. `penstock.load.torch` is imported by its users, so that this package needs no framework."""

from penstock.load.gather import Batch
from penstock.load.loader import Loader
from penstock.load.order import rows_at

__all__ = ["Batch", "Loader", "rows_at"]
