"""Whether compiling pays back: seconds saved per step times steps left, against what compiling costs.

Pure arithmetic over figures that were measured, or are assumed where nothing was. Assumed, from one H200 (2026): per
block 7 to 13 s for 46 to 51 % of the peak, the whole model 22 to 68 s for about 2 % more; compiling gains 16 to 44 %.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASSUMED", "Compiling", "best_way"]


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """One way to compile: seconds before the first step, and the share of an eager step's seconds that is saved."""

    way: str
    cost_seconds: float
    saved_share: float
    is_measured: bool = False

    def net_seconds(self, *, step_seconds: float, steps: int) -> float:
        """Seconds saved over the run, the cost taken off."""
        return self.saved_share * step_seconds * steps - self.cost_seconds

    def arithmetic(self, *, step_seconds: float, steps: int) -> str:
        """The sum in words."""
        saved = self.saved_share * step_seconds
        net = self.net_seconds(step_seconds=step_seconds, steps=steps)
        kind = "measured" if self.is_measured else "assumed"
        return (
            f"{self.way}: {saved:.4g} s a step x {steps:,} steps - {self.cost_seconds:.3g} s to compile ({kind}) "
            f"= {net:+,.0f} s"
        )


# The cautious end of the gains, the middle of the costs.
ASSUMED = (
    Compiling(way="blocks", cost_seconds=10.0, saved_share=0.14),
    Compiling(way="whole", cost_seconds=45.0, saved_share=0.16),
)


def best_way(ways: tuple[Compiling, ...], *, step_seconds: float, steps: int) -> tuple[str, str]:
    """The way that saves most over the run, `off` if none saves, and the arithmetic."""
    best = max(ways, key=lambda way: way.net_seconds(step_seconds=step_seconds, steps=steps))
    reason = best.arithmetic(step_seconds=step_seconds, steps=steps)
    return (best.way if best.net_seconds(step_seconds=step_seconds, steps=steps) > 0 else "off"), reason
