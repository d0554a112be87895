"""Draw the order of one step, for the values of `gather` and `update`: `python docs/pictures/draw_step.py`.

A drawing of the rules, not a measurement: durations are invented, and follow the sizes of the buckets.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import Patch

SIZES = (1.0, 1.0, 1.0, 0.5, 0.25)  # in backward's order; the last ones are small, as those of ShardedOptimizer are
COLOURS = {"backward": "#88ccee", "forward": "#bbddaa", "update": "#117733", "reduce": "#332288", "gather": "#aa4499"}
LIGHT = ("backward", "forward")
BACKWARD, REDUCE, UPDATE, GATHER, FORWARD = 4.0, 3.0, 0.8, 3.0, 2.6
IN_FLIGHT = 2  # reductions, at most; launching another one first waits for the oldest
ROWS = (("step", "step"), ("forward", "step"), ("forward", "backward"))  # gather, update


@dataclass
class Timeline:
    """What the host and the network do; each does one thing at a time."""

    host: float = 0.0
    wire: float = 0.0
    work: list[tuple[str, str, float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def compute(self, kind: str, label: str, length: float, ready: float = 0.0) -> float:
        """Work on the host, which waits until it can begin; when it ends."""
        if ready > self.host:
            self.waits.append((self.host, ready))
        start = max(self.host, ready)
        self.work.append(("host", kind + label, start, length))
        self.host = start + length
        return self.host

    def send(self, kind: str, label: str, length: float) -> float:
        """A message that is launched now; when it has arrived."""
        start = max(self.wire, self.host)
        self.work.append(("wire", kind + label, start, length))
        self.wire = start + length
        return self.wire


def play(gather: str, update: str) -> tuple[Timeline, float, float]:
    """One step, and the forward pass behind it; also when `step()` begins and returns."""
    return play_in_backward() if update == "backward" else play_in_step(gather)


def play_in_backward() -> tuple[Timeline, float, float]:
    """Updates inside backward, with `gather="forward"`; `step()` has nothing left to do."""
    line, summed, there = Timeline(), dict[int, float](), dict[int, float]()

    def finish_oldest() -> None:
        bucket, ready = next(iter(summed.items()))
        del summed[bucket]
        line.compute("update ", str(bucket), UPDATE * SIZES[bucket], ready)
        there[bucket] = line.send("gather ", str(bucket), GATHER * SIZES[bucket])

    for bucket, size in enumerate(SIZES):
        line.compute("backward ", str(bucket), BACKWARD * size)
        if len(summed) == IN_FLIGHT:
            finish_oldest()
        summed[bucket] = line.send("reduce ", str(bucket), REDUCE * size)
    while summed:
        finish_oldest()
    end = line.host
    for bucket in reversed(range(len(SIZES))):
        line.compute("forward ", str(bucket), FORWARD * SIZES[bucket], there[bucket])
    return line, end, end


def play_in_step(gather: str) -> tuple[Timeline, float, float]:
    """Updates in `step()`."""
    line, summed, there = Timeline(), dict[int, float](), dict[int, float]()
    for bucket, size in enumerate(SIZES):
        line.compute("backward ", str(bucket), BACKWARD * size)
        summed[bucket] = line.send("reduce ", str(bucket), REDUCE * size)
    begin = line.host
    for bucket, size in enumerate(SIZES):
        line.compute("update ", str(bucket), UPDATE * size, summed[bucket])
        if gather == "step":
            there[bucket] = line.send("gather ", str(bucket), GATHER * size)
    order = list(reversed(range(len(SIZES))))
    if gather == "step":
        line.waits.append((line.host, max(there.values())))
        line.host = max(there.values())
    else:
        there = {bucket: line.send("gather ", str(bucket), GATHER * SIZES[bucket]) for bucket in order}
    end = line.host
    for bucket in order:
        line.compute("forward ", str(bucket), FORWARD * SIZES[bucket], there[bucket])
    return line, begin, end


def strip(axes: Any, gather: str, update: str) -> None:
    """One timeline."""
    line, begin, end = play(gather, update)
    for row, name, start, length in line.work:
        kind, _, bucket = name.partition(" ")
        level = 0.0 if row == "wire" else 1.0
        axes.barh(level, length, left=start, height=0.62, color=COLOURS[kind], edgecolor="white", linewidth=0.8)
        if length > 0.35:
            ink = "black" if kind in LIGHT else "white"
            axes.text(start + length / 2, level, bucket, ha="center", va="center", fontsize=8, color=ink)
    for start, stop in line.waits:
        axes.barh(
            1.0, stop - start, left=start, height=0.62, color="white", edgecolor="#cc3311", hatch="////", linewidth=0.8
        )
    if end > begin:
        arrow = {"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "linewidth": 1}
        axes.annotate("", (begin, 1.5), (end, 1.5), arrowprops=arrow)
    else:
        axes.vlines(begin, 1.4, 1.6, color="black", linewidth=1)
    axes.text((begin + end) / 2, 1.62, "step()", ha="center", fontsize=8)
    further = "" if update == "step" else f', update="{update}"'
    axes.set_title(f'gather="{gather}"{further}', loc="left", fontsize=10, family="monospace")
    axes.set_ylim(-0.45, 1.95)
    axes.set_yticks([1.0, 0.0], ["host", "network"])
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(path: Path) -> None:
    """All timelines, on one axis of time."""
    pyplot.switch_backend("agg")
    with pyplot.rc_context({"svg.hashsalt": "zerostep", "font.family": "DejaVu Sans", "hatch.linewidth": 0.6}):
        figure, rows = pyplot.subplots(len(ROWS), 1, figsize=(10, 6.0), sharex=True, layout="constrained")
        for axes, (gather, update) in zip(rows, ROWS, strict=True):
            strip(axes, gather, update)
        rows[-1].set_xlabel("time, not to scale of any machine; numbers are those of buckets, in the order of backward")
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
        handles.append(Patch(facecolor="white", edgecolor="#cc3311", hatch="////", label="the host waits"))
        figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("step-order.svg"))
