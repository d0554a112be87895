"""What a user can act on."""

__all__ = ["PlanError"]


class PlanError(ValueError):
    """There is nothing to plan with; the message is one line that says what is wrong and what to do."""

    def format_message(self) -> str:
        """The one line, for a command line."""
        return " ".join(str(self).split())
