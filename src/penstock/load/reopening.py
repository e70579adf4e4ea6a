"""A plan, told so shortly that it can be sent to another process: where the store is and which rows are meant.

A worker process opens the store itself: maps and arrays aren't copied, and a store that changed meanwhile is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.pack import Plan, plan_of
from penstock.store import open_store

__all__ = ["PlanAddress"]


@dataclass(frozen=True, kw_only=True)
class PlanAddress:
    """Where a plan's store is, its version, and the plan's identity."""

    store_path: str
    version: int
    identity: dict[str, Any]

    @classmethod
    def of(cls, plan: Plan) -> PlanAddress:
        """The address of an open plan."""
        return cls(store_path=plan.store.location, version=plan.store.version, identity=plan.identity)

    def open(self) -> Plan:
        """Opens the store and makes the plan again.

        Raises:
            PlanError: what is there now makes another plan; both are shown.
        """
        store = open_store(self.store_path, version=self.version)
        plan = plan_of(store, self.identity)
        if plan.identity != self.identity:
            store.close()
            raise PlanError(
                f"{self.store_path}@{self.version} makes the plan {plan.identity}, wanted is {self.identity}",
                hint="the store was replaced while it was in use: start again",
            )
        return plan
