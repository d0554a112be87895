"""The exceptions of this package."""

# What parsing malformed text can raise: code that decodes foreign text converts these into one error of its own.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, RuntimeError)


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, of another model, or could not be written; the message says what to do."""


class TransportError(RuntimeError):
    """A transfer failed; the message names the other rank and what was under way."""


class VerificationError(RuntimeError):
    """A step of the sharded optimizer differs from the same step of an unsharded one."""


class AuditError(RuntimeError):
    """Ranks hold different bits of what must be the same; the message names the tensor and the ranks."""


class StepMismatchError(RuntimeError):
    """Ranks are not in the same step, or not with the same options; the message has the values of each rank."""


class InterruptedPassError(RuntimeError):
    """A backward pass was stopped before any message was sent; the optimizer is unchanged and can go on."""
