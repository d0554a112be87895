"""The one exception for everything that is wrong with a checkpoint."""

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, of another model, or could not be written; the text says what to do."""
