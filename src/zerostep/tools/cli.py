"""The command line. Its libraries come with the extra `cli`; every command is a module of `zerostep.tools.commands`."""

import logging
import sys

try:
    import typer

    from zerostep.errors import CheckpointError
    from zerostep.tools.commands import convert, demo, inspect, plan, trace
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    sys.stderr.write(f"zerostep: the command line needs {missing.name}: pip install 'zerostep[cli]'\n")
    sys.exit(2)

app = typer.Typer(add_completion=False)


@app.callback()
def zerostep() -> None:
    """Optimizer-state sharding for PyTorch data-parallel training."""


app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=inspect.EPILOG)(inspect.inspect)
app.command(epilog=convert.EPILOG)(convert.convert)
app.command(epilog=trace.EPILOG, context_settings=trace.CONTEXT)(trace.trace)


def main() -> None:
    """Run the command line; an error the user can act on is one line and exit code 2."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it reports every rank it stops
    try:
        status = app(standalone_mode=False)
    except typer.Abort:
        status = 130
    except Exception as error:
        sys.stderr.write(f"zerostep: {_message(error)}\n")
        status = 2
    sys.exit(status)


def _message(error: Exception) -> str:
    """Errors for users, ours and those of typer, have their line ready; any other is a defect, and shown whole."""
    if isinstance(error, CheckpointError):
        return str(error)
    if hasattr(error, "format_message"):
        return str(error.format_message())
    raise error


if __name__ == "__main__":
    main()
