"""Stage 4: store -> plan of rows."""

from penstock.pack.concat import ConcatPlan, plan_concat
from penstock.pack.making import POLICIES, checked_policy, make_plan, plan_of
from penstock.pack.plan import Plan, Spans, Stretches, WholeRows

__all__ = [
    "POLICIES",
    "ConcatPlan",
    "Plan",
    "Spans",
    "Stretches",
    "WholeRows",
    "checked_policy",
    "make_plan",
    "plan_concat",
    "plan_of",
]
