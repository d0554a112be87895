"""Draw one bucket, as it is planned for a small model on four ranks: `python docs/pictures/draw_bucket.py`."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from torch import nn, optim

from zerostep.plan.layout import Bucket, Layout, Slot
from zerostep.plan.layout_planner import LayoutPlanner, Settings

RANKS = 4
COLOURS = ("#332288", "#88ccee", "#117733", "#ddcc77")
INK = ("white", "black", "white", "black")


def model() -> nn.Module:
    """Five matrices of different sizes."""
    sizes = {"embed": (48, 20), "attn": (20, 20), "up": (20, 40), "down": (40, 20), "head": (20, 48)}
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


def layout(optimizer: Any, params: Sequence[tuple[str, Any]]) -> Layout:
    """What `ShardedOptimizer` would plan."""
    blueprint = LayoutPlanner(optimizer, {}, Settings(bucket_mb=0.05))
    return blueprint.plan([blueprint.complete({"params": list(params)})], RANKS)


def slots(axes: Any, plan: Layout, bucket: Bucket, level: float) -> None:
    """A row of parameters, in address order."""
    for slot in bucket.slots:
        spec, length = plan.params[slot.param], slot.span.length
        axes.barh(level, length, left=slot.span.start, height=0.5, color="#eeeeee", edgecolor="#444444", linewidth=1)
        label = f"{spec.name.partition('.')[0]}\n{' x '.join(map(str, spec.shape))}"
        axes.text(middle(bucket, slot), level, label, ha="center", va="center", fontsize=8)


def middle(bucket: Bucket, slot: Slot) -> float:
    """Where a label has most room: in the middle of the longest stretch without a cut."""
    ends = sorted(
        {slot.span.start, slot.span.stop, *(cut for cut in bucket.cuts if slot.span.start < cut < slot.span.stop)}
    )
    start, stop = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])
    return (start + stop) / 2


def cuts(axes: Any, bucket: Bucket, level: float) -> None:
    """A row of owners, and the cuts between them through both rows."""
    for rank in range(RANKS):
        owned = bucket.owned(rank)
        axes.barh(
            level, owned.length, left=owned.start, height=0.42, color=COLOURS[rank], edgecolor="white", linewidth=0
        )
        text = f"rank {rank}\n{owned.length}"
        axes.text(owned.start + owned.length / 2, level, text, ha="center", va="center", fontsize=8, color=INK[rank])
    for cut in bucket.cuts[1:-1]:
        axes.plot([cut, cut], [level - 0.21, level + 0.86], color="#cc3311", linewidth=1.6, linestyle=(0, (4, 2)))


def strip(axes: Any, plan: Layout, title: str) -> None:
    """One bucket: its slots, and below them who owns what."""
    bucket = max(plan.buckets, key=lambda found: found.size)
    slots(axes, plan, bucket, 0.6)
    cuts(axes, bucket, 0.0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(-0.005 * bucket.size, 1.005 * bucket.size)
    axes.set_ylim(-0.25, 0.9)
    axes.set_yticks([0.6, 0.0], ["slots", "owners"])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("address in the bucket, in elements", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(path: Path) -> None:
    """Both kinds of cuts, one above the other."""
    named = [(name, param) for name, param in model().named_parameters()]
    pyplot.switch_backend("agg")
    with pyplot.rc_context({"svg.hashsalt": "zerostep", "font.family": "DejaVu Sans"}):
        figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 4.6), layout="constrained")
        strip(
            upper,
            layout(optim.AdamW, named),
            "AdamW, element-wise: cuts (red) fall anywhere, and all ranks own equally much",
        )
        strip(
            lower,
            layout(optim.Adafactor, named),
            "Adafactor, not element-wise: cuts fall between parameters, which are dealt out by their cost",
        )
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("bucket.svg"))
