"""Whether parameters and optimizer state belong to one step, on this rank and, as far as loads go, on its peers."""

from __future__ import annotations

from collections.abc import Callable

from zerostep.errors import StepMismatchError


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
        self._loads = self._recoveries = 0

    def mark_broken(self, description: str, error_class: type[RuntimeError] = RuntimeError) -> RuntimeError:
        """Refuse everything until a state is loaded; the error to raise."""
        self._failure = description
        self._on_broken(description)
        if issubclass(error_class, StepMismatchError):
            self._loads = 0  # all ranks raise this, and all load: what one has loaded alone is over
        return error_class(f"{description}; restart from the last checkpoint on all ranks")

    def mark_recovered(self) -> None:
        """A whole state was loaded."""
        self._failure = None
        self._on_recovered()
        self._recoveries += 1

    @property
    def recoveries(self) -> int:
        """How often a state was loaded, in whatever way; of this rank alone, not to be compared."""
        return self._recoveries

    @property
    def loads(self) -> int:
        """State dicts that this rank has loaded since the last load that all ranks made together.

        Equal on all ranks, or one was left out: `load_state_dict` is local, and nothing else would tell.
        """
        return self._loads

    def count_local_load(self) -> None:
        """This rank has loaded a state dict."""
        self._loads += 1

    def begin_shared_load(self) -> None:
        """All ranks are about to replace their state together, so what each has loaded before counts no longer.

        Called before anything is replaced: a rank where that fails must not count otherwise than the others.
        """
        self._loads = 0

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
