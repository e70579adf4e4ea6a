"""Whether compiling pays back: seconds saved per step times steps left, against what compiling costs.

Pure arithmetic over figures that were measured, or are assumed where nothing was. Assumed, from one H200 (2026): per
block 7 to 17 s, and a gain of 16 to 44 %. The whole model in one took 37 to 59 s there and was slower than its blocks
(456 against 560 k tokens/s at 124M): it is taken only where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASSUMED", "Compiling", "weighed"]


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
ASSUMED = Compiling(way="blocks", cost_seconds=10.0, saved_share=0.14)


def weighed(compiling: Compiling, *, step_seconds: float, steps: int) -> tuple[str, str]:
    """The way if it saves over the run, `off` if not, and the arithmetic."""
    reason = compiling.arithmetic(step_seconds=step_seconds, steps=steps)
    return (compiling.way if compiling.net_seconds(step_seconds=step_seconds, steps=steps) > 0 else "off"), reason
