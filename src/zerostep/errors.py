"""The one exception for everything that is wrong with a checkpoint."""

__all__ = ["MALFORMED", "CheckpointError", "InterruptedPassError", "TransportError", "VerificationError"]

# What malformed text can make code that expects another shape of it, or Python itself, raise.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, RuntimeError)


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, of another model, or could not be written; the text says what to do."""


class TransportError(RuntimeError):
    """A transfer failed; the message names the other rank and what was under way."""


class VerificationError(RuntimeError):
    """The sharded optimizer does not do what the unsharded one does."""


class InterruptedPassError(RuntimeError):
    """A backward pass was ended before anything set out; all is as it was."""
