"""Whether parameters and optimizer state belong to one step."""

from __future__ import annotations

from collections.abc import Callable


def _ignore(description: str) -> None:
    """Nobody is told of failures."""


def _do_nothing() -> None:
    """Nobody is told of recoveries."""


class Health:
    """Remembers a step that failed half-way; every public method that relies on the state calls `check` first.

    `on_broken` is told what has failed; `on_recovered` is called when a whole state was loaded.
    """

    def __init__(
        self, on_broken: Callable[[str], None] = _ignore, on_recovered: Callable[[], None] = _do_nothing
    ) -> None:
        self._failure: str | None = None
        self._on_broken, self._on_recovered = on_broken, on_recovered

    def mark_broken(self, description: str) -> RuntimeError:
        """Refuse everything until a state is loaded; the error to raise."""
        self._failure = description
        self._on_broken(description)
        return RuntimeError(f"{description}; restart from the last checkpoint on all ranks")

    def mark_recovered(self) -> None:
        """A whole state was loaded."""
        self._failure = None
        self._on_recovered()

    @property
    def broken(self) -> bool:
        """Whether a step has failed half-way."""
        return self._failure is not None

    def check(self) -> None:
        """Raise if a step has failed half-way and nothing was loaded since."""
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}; parameters and optimizer state are from different steps: load the last checkpoint, "
                "the model's and this optimizer's, on all ranks before going on"
            )
