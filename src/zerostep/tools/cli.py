"""The command `zerostep`: each of its commands is a module of `zerostep.tools.commands`. Needs the extra `cli`."""

import logging
import sys

try:
    import typer

    from zerostep.errors import CheckpointError
    from zerostep.tools.commands import convert, demo, inspect, plan, trace
except ModuleNotFoundError as missing:
    # Only the missing extra is a user's problem; a missing torch or a defect of ours keeps its traceback.
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
    """Run the command line; an error that the user can fix is printed as one line, with exit code 2."""
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
    """Return the line to print for a user's error; raise any other again, as a defect that needs its traceback."""
    if isinstance(error, CheckpointError):
        return str(error)
    # CommandError and the errors of typer, whose base class has moved between its versions.
    if hasattr(error, "format_message"):
        return str(error.format_message())
    raise error


if __name__ == "__main__":
    main()
