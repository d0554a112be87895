"""Where the training loop is: between steps, in a backward pass, or behind one.

::

                 first gradient             backward is over
      BETWEEN ------------------> BACKWARD ------------------> REDUCED
         ^                           ^                          |   |
         |                           |  first gradient of a     |   |
         |                           |  further pass            |   |
         |                           +--------------------------+   |
         +-------------- step(), or all gradients dropped ----------+

In every pass every rank launches every bucket once, in one order, before its backward call returns. All ranks go
through the same states; the number of the step and of the pass travel with the message that ends each pass.
"""

from __future__ import annotations

from enum import Enum

from zerostep.errors import InterruptedPassError


class Phase(Enum):
    """What has happened since the last step, or since all gradients were dropped."""

    BETWEEN = "no backward pass has begun since"
    BACKWARD = "a backward pass is open: gradients arrive, full buckets are launched"
    REDUCED = "all buckets of all passes are launched"


class Iteration:
    """The number of steps, the number of passes since the last one, and the phase.

    With `one_pass`, every pass is a step: a second one is refused until `end_step` was called.
    """

    def __init__(self, one_pass: bool = False) -> None:
        self._one_pass = one_pass
        self._phase = Phase.BETWEEN
        self._steps = self._passes = 0

    @property
    def phase(self) -> Phase:
        """What has happened since the last step, or since all gradients were dropped."""
        return self._phase

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps

    @property
    def passes(self) -> int:
        """Backward passes that have ended since the last step."""
        return self._passes

    @property
    def in_pass(self) -> bool:
        """Whether a pass is open."""
        return self._phase is Phase.BACKWARD

    def begin_pass(self) -> None:
        """The first gradient of a backward call is there."""
        assert self._phase is not Phase.BACKWARD
        self._phase = Phase.BACKWARD

    def refuse_second_pass(self) -> None:
        """Raise if a pass must not begin before the next `end_step`."""
        if self._one_pass and self._passes:
            raise InterruptedPassError(
                'with update="backward" a backward pass updates the parameters, and a second one has begun before '
                "step(): call step() after each pass, and use no_sync() for all passes but the last to accumulate"
            )

    def end_pass(self) -> None:
        """All buckets of the open pass are launched."""
        assert self._phase is Phase.BACKWARD
        self._phase, self._passes = Phase.REDUCED, self._passes + 1

    def drop(self) -> None:
        """All gradients were dropped, between two passes."""
        self._phase = Phase.BETWEEN

    def end_step(self) -> None:
        """A step is complete."""
        self._phase, self._passes, self._steps = Phase.BETWEEN, 0, self._steps + 1

    def restart(self, steps: int | None) -> None:
        """A state was loaded, which `steps` steps have made, if that is known: begin anew between two steps."""
        self._phase, self._passes = Phase.BETWEEN, 0
        self._steps = self._steps if steps is None else steps
