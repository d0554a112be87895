"""Errors that the command line prints as one line, without a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what it was given; the message says what is wrong and what to do."""

    def format_message(self) -> str:
        """Return the message as one line."""
        return " ".join(str(self).split())


class PlanError(CommandError, ValueError):
    """`zerostep plan` cannot plan this model, optimizer or number of ranks."""


class TraceError(CommandError):
    """A trace cannot be recorded, read or drawn."""


class DemoError(CommandError):
    """The demo cannot run, or one of its ranks failed."""
