"""What every framework's loader has from `Loader`: position, state, its thread's end. Only the batches are its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from penstock.errors import ConfigError
from penstock.load.loader import Loader
from penstock.load.mixed import MixedLoader

__all__ = ["WrappedLoader"]


class WrappedLoader:
    """A `Loader` inside; a subclass sets `_loader` and gives `__next__`."""

    _loader: Loader

    @property
    def position(self) -> int:
        """Global rows consumed."""
        return self._loader.position

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)

    @property
    def weights(self) -> dict[str, float]:
        """See `MixedLoader.weights`; of a plan there are none."""
        return self._loader.weights if isinstance(self._loader, MixedLoader) else {}

    def change_weights(self, weights: Mapping[str, float]) -> None:
        """See `MixedLoader.change_weights`."""
        if not isinstance(self._loader, MixedLoader):
            raise ConfigError("this loader reads one plan, which has no weights", hint="make it of a mixture")
        self._loader.change_weights(weights)

    def wait(self, seconds: float) -> bool:
        """See `Loader.wait`."""
        return self._loader.wait(seconds)

    def __iter__(self) -> Self:
        return self

    def close(self) -> None:
        """Ends the thread that fills ahead."""
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
