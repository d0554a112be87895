"""The one exception for everything that is wrong with a checkpoint."""

__all__ = ["MALFORMED", "CheckpointError"]

# What malformed text can make code that expects another shape of it, or Python itself, raise.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, RuntimeError)


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, of another model, or could not be written; the text says what to do."""
