"""A plan or a mixture, told so shortly that it can be sent to another process: where the stores are, which rows it has.

A worker process opens the stores itself: maps and arrays aren't copied, and a store that changed meanwhile is noticed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.pack import Plan, plan_of
from penstock.pack.mixture import MixRecipe, Mixture, make_mixture
from penstock.store import open_store

__all__ = ["MixtureAddress", "PlanAddress", "address_of"]


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
            raise _replaced(f"{self.store_path}@{self.version}", plan.identity, self.identity)
        return plan


@dataclass(frozen=True, kw_only=True)
class MixtureAddress:
    """What a mixture was made of, and its identity."""

    recipe: MixRecipe
    identity: dict[str, Any]

    @classmethod
    def of(cls, mixture: Mixture) -> MixtureAddress:
        """The address of an open mixture.

        Raises:
            PlanError: it was put together by hand: nothing says how to make it again.
        """
        if mixture.recipe is None:
            raise PlanError(
                "a mixture that was put together by hand can't be sent to another process",
                hint="make it with `make_mixture`, or use no worker processes",
            )
        return cls(recipe=mixture.recipe, identity=mixture.identity)

    def open(self) -> Mixture:
        """Opens the stores and makes the mixture again.

        Raises:
            PlanError: what is there now makes another mixture; both are shown.
        """
        recipe = self.recipe
        with ExitStack() as stack:
            stores = {
                name: stack.enter_context(open_store(place, version=version)) for name, place, version in recipe.stores
            }
            mixture = make_mixture(
                stores,
                recipe.mix,
                epochs=recipe.epochs,
                temperature=recipe.temperature,
                split=recipe.split,
                **recipe.plan_options,
            )
            if mixture.identity != self.identity:
                raise _replaced(", ".join(place for _, place, _ in recipe.stores), mixture.identity, self.identity)
            stack.pop_all()  # the stores stay open: the mixture reads them
        return mixture


def address_of(rows: Plan | Mixture) -> PlanAddress | MixtureAddress:
    """The address of whatever rows are read from."""
    return MixtureAddress.of(rows) if isinstance(rows, Mixture) else PlanAddress.of(rows)


def _replaced(place: str, found: dict[str, Any], wanted: dict[str, Any]) -> PlanError:
    return PlanError(
        f"{place} makes the plan {found}, wanted is {wanted}",
        hint="the store was replaced while it was in use: start again",
    )
