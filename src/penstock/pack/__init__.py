"""Stage 4: store -> plan of rows."""

from penstock.pack.concat import plan_concat
from penstock.pack.plan import Plan

__all__ = ["Plan", "plan_concat"]
