"""`zerostep convert`: export a checkpoint as one file, or reshard it for another number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from zerostep.checkpoint.export import consolidate
from zerostep.checkpoint.reshard import reshard

_RANKS = re.compile(r"([1-9][0-9]*)(-ranks?)?")
EPILOG = """\b
Examples:
  zerostep convert step-1200 optimizer.pt --to plain
  zerostep convert step-1200 model.safetensors --to model
  zerostep convert step-1200 step-1200-on-64 --to 64-ranks
"""


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A directory that zerostep.save() wrote.")],
    out: Annotated[Path, typer.Argument(help="What to write; it must not exist yet.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="plain|zero|model|N-ranks",
            help="plain: the state dict of the unsharded optimizer (.pt), which torch.load(weights_only=True) reads. "
            "zero: the same, which is what torch's ZeroRedundancyOptimizer loads. model: the model's weights (.pt or "
            ".safetensors). N-ranks: a checkpoint as N ranks would have written it.",
        ),
    ],
) -> int:
    """Write a checkpoint in another form, without processes or GPUs."""
    ranks = _RANKS.fullmatch(to)
    if ranks:
        reshard(checkpoint, out, int(ranks[1]))
    elif to in ("plain", "zero", "model"):
        consolidate(checkpoint, out, "model" if to == "model" else "optimizer")
    else:
        raise typer.BadParameter(f"--to takes plain, zero, model or a number of ranks such as 8-ranks, not {to!r}")
    typer.echo(f"wrote {out}")
    return 0
