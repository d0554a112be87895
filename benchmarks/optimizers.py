"""Which optimizer classes work: each is trained plainly and sharded over two ranks, and compared bit for bit.

    python -m benchmarks.optimizers                      # all packages that are installed
    python -m benchmarks.optimizers --packages torch,schedulefree --markdown table.md

Packages that are not installed are left out. Two processes train each class over Gloo: without sharding, with
`ZeroRedundancyOptimizer`, with `ShardedOptimizer` and `partition="auto"`, and with `partition="parameters"`. Classes
with `train()` and `eval()` are switched to evaluation at the end, too.
"""

import argparse
import contextlib
import functools
import importlib
import json
import logging
import math
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.functional import mse_loss

from benchmarks.optimizer_list import MODULES, Entry, entries
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

RANKS, STEPS = 2, 10
DEADLINE = 300.0
WAYS = ("drop-in", "auto", "parameters")
EQUAL, CUT, REFUSED = "equal", "cut", "refused"

Series = list[Tensor]


@dataclass(frozen=True)
class Row:
    """How one class did: a word for each way, whether "auto" cut its parameters, and a note."""

    entry: Entry
    ways: dict[str, str]
    note: str = ""


# One rank.


def make_model(matrices: bool) -> nn.Module:
    """Layers of some size, the same on all ranks; without biases and norms where a class takes matrices alone."""
    torch.manual_seed(0)
    middle: list[nn.Module] = [] if matrices else [nn.LayerNorm(136)]
    layers = [nn.Linear(16, 136, bias=not matrices), *middle, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(136, 130, bias=not matrices), nn.Tanh(), nn.Linear(130, 4, bias=False))


def groups_of(entry: Entry, model: nn.Module) -> list[Any]:
    """The matrices, and the rest in a group of its own; all parameters together where a class takes no groups."""
    params = list(model.parameters())
    kinds = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]
    return params if entry.name == "LBFGS" else [{"params": members} for members in kinds if members]


def train(model: nn.Module, optimizer: Any, closure: bool, steps: int, sums: bool) -> Series:
    """All parameters after each step, and in evaluation mode; with `sums` gradients are averaged by hand."""
    switch(optimizer, "train")
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        evaluate = functools.partial(_loss, model, optimizer, step, sums)
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        found.append(flat(model))
    switch(optimizer, "eval")
    return [*found, flat(model)]


def switch(optimizer: Any, mode: str) -> None:
    """Call `train()` or `eval()` of an optimizer that has it."""
    if callable(getattr(optimizer, mode, None)):
        getattr(optimizer, mode)()


def _loss(model: nn.Module, optimizer: Any, step: int, sums: bool) -> Tensor:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs, targets = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
    with torch.enable_grad():
        loss = mse_loss(model(inputs), targets)
        loss.backward()
    if sums:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad.mul_(1 / RANKS))
    return loss.detach()


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters."""
    return torch.cat([param.detach().reshape(-1).float() for param in model.parameters()])


def build(entry: Entry, way: Any, model: nn.Module) -> Any:
    """The optimizer of an entry in one way."""
    kind, options = entry.load(), dict(entry.options)
    if way == "plain":
        return kind(groups_of(entry, model), **options)
    if way == "drop-in":
        return ZeroRedundancyOptimizer(groups_of(entry, model), kind, **options)
    return ShardedOptimizer(model, kind, groups_of(entry, model), partition=way, bucket_mb=0.02, **options)


def run_way(entry: Entry, way: str, steps: int) -> tuple[Series, Any, bool]:
    """Train in one way: the parameters, the optimizer, and whether random numbers were drawn."""
    model = make_model(entry.matrices)
    optimizer = build(entry, way, model)
    sums = way in ("plain", "drop-in")
    found = train(model, optimizer, entry.closure, steps, sums)
    drawn = torch.get_rng_state()
    torch.manual_seed(1)
    return found, optimizer, not torch.equal(drawn, torch.get_rng_state())


def difference(ours: Series, plain: Series) -> float:
    """The largest difference in any step, relative to the largest parameter; zero if all bits are equal."""
    pairs = list(zip(ours, plain, strict=True))
    if all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs):
        return 0.0
    gaps = [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def judge(entry: Entry, steps: int) -> tuple[dict[str, str], str]:
    """A word for each way, and a note."""
    try:
        plain, _, random = run_way(entry, "plain", steps)
    except Exception as error:
        return {}, f"does not run here by itself: {_short(error)}"
    if not all(map(_is_finite, plain)):
        return {}, "does not stay finite in this training by itself"
    words, notes = dict[str, str](), ["draws random numbers"] if random else []
    for way in WAYS:
        words[way], note = _judge_way(entry, way, steps, plain)
        notes += [note] if note and note not in notes else []
    return words, "; ".join(notes)


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _judge_way(entry: Entry, way: str, steps: int, plain: Series) -> tuple[str, str]:
    try:
        ours, optimizer, _ = run_way(entry, way, steps)
    except ValueError as error:
        if "looks at all parameters at once" in str(error):
            return REFUSED, "looks at all parameters at once"
        return "fails", _short(error)
    except Exception as error:
        return "fails", _short(error)
    gap = difference(ours, plain)
    if gap:
        return f"differs by {gap:.0e}", ""
    return (CUT if way == "auto" and _is_cut(optimizer) else EQUAL), ""


def _is_cut(optimizer: ShardedOptimizer) -> bool:
    return all(spec.splittable for spec in optimizer.optimizer_view().parts[0].layout.params)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/").replace("<", "(").replace(">", ")")
    return f"{type(error).__name__}: {text[:110]}"


def work(entry: Entry, rank: int, store: str, steps: int, connection: Connection) -> None:
    """One rank of one entry, in a process of its own; sends words and note."""
    with _silence():
        timeout = timedelta(seconds=DEADLINE / 2)
        dist.init_process_group("gloo", store=FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timeout)
        try:
            connection.send(judge(entry, steps))
        except Exception:
            connection.send(({}, traceback.format_exc(limit=-1).splitlines()[-1]))
        dist.barrier()
        os._exit(0)  # what an optimizer has started must not keep this process


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # a minute for each class that compiles its step
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        yield


# All entries.


def run_entry(entry: Entry, steps: int = STEPS) -> Row:
    """Train one class on two ranks; the ranks must agree."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [context.Process(target=work, args=(entry, r, store, steps, pipes[r][1])) for r in range(RANKS)]
        for rank in ranks:
            rank.start()
        try:
            results = _receive([receiver for receiver, _ in pipes], [rank.sentinel for rank in ranks])
        finally:
            for rank in ranks:
                rank.join(5)
                rank.kill()
                rank.join()
    if results is None:
        return Row(entry, {}, f"no answer in {DEADLINE:.0f} s, or a process that died")
    return combine(entry, results)


def run_or_recall(entry: Entry, steps: int, kept: Path | None) -> Row:
    """The row of an entry from a file of results, or a new one, which is then added to it."""
    key = f"{entry.package} {entry.name}"
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    known = {found["class"]: found for found in map(json.loads, lines)}
    if key in known:
        return Row(entry, known[key]["ways"], known[key]["note"])
    row = run_entry(entry, steps)
    if kept is not None:
        with kept.open("a") as file:
            file.write(json.dumps({"class": key, "ways": row.ways, "note": row.note}) + "\n")
    return row


def _receive(receivers: Sequence[Connection], sentinels: Sequence[int]) -> list[tuple[dict[str, str], str]] | None:
    end, found = time.monotonic() + DEADLINE, dict[int, tuple[dict[str, str], str]]()
    while len(found) < len(receivers):
        waiting = {receivers[r]: r for r in range(len(receivers)) if r not in found}
        ready = wait([*waiting, *sentinels], max(0.0, end - time.monotonic()))
        answers = [each for each in waiting if each in ready]
        if not answers:
            return None
        for each in answers:
            found[waiting[each]] = each.recv()
    return [found[rank] for rank in sorted(found)]


def combine(entry: Entry, results: Sequence[tuple[dict[str, str], str]]) -> Row:
    """One row of what the ranks have found: a rank that failed or differs counts."""
    order = lambda word: (word == "fails", word.startswith("differs"), word == REFUSED, word == EQUAL)  # noqa: E731
    names = [way for way in WAYS if any(way in words for words, _ in results)]
    ways = {way: max((words.get(way, "fails") for words, _ in results), key=order) for way in names}
    return Row(entry, ways, max((note for _, note in results), key=len))


def installed(packages: Iterable[str]) -> Iterator[str]:
    """The packages that can be imported."""
    for package in packages:
        try:
            importlib.import_module(MODULES[package])
        except Exception as error:
            print(f"{package}: left out, {type(error).__name__}: {error}", flush=True)
            continue
        yield package


# The table.

_MEANING = {
    EQUAL: "equal",
    CUT: "equal",
    REFUSED: "refused",
}


def table(rows: Sequence[Row]) -> str:
    """All rows in Markdown, by package."""
    lines = ["| class | drop-in | by elements | by parameters | note |", "|---|---|---|---|---|"]
    package = ""
    for row in rows:
        if row.entry.package != package:
            package = row.entry.package
            lines.append(f"| **{package} {_version(package)}** | | | | |")
        lines.append("| " + " | ".join([f"`{row.entry.name}`", *cells(row.ways), row.note]) + " |")
    return "\n".join(lines)


def cells(ways: dict[str, str]) -> list[str]:
    """Drop-in, by elements, by parameters; a dash where a way is not used or was not reached."""
    drop_in, auto, whole = (ways.get(way, "-") for way in WAYS)
    elements = _MEANING.get(auto, auto) if auto in (CUT, REFUSED) else "-"
    # "auto" keeps these whole; what it makes of them counts like the setting itself.
    worse = auto if auto not in (EQUAL, CUT, REFUSED, "-") else whole
    return [_MEANING.get(drop_in, drop_in), elements, _MEANING.get(worse, worse)]


def summary(rows: Sequence[Row]) -> str:
    """How many classes there are of each kind."""
    ran = [row for row in rows if row.ways]
    counts = {
        "equal in the drop-in": sum(row.ways["drop-in"] == EQUAL for row in ran),
        "equal when sharded by elements": sum(row.ways["auto"] == CUT for row in ran),
        "equal when sharded by parameters": sum(row.ways["parameters"] == EQUAL for row in ran),
        "refused": sum(row.ways["auto"] == REFUSED for row in ran),
    }
    parts = ", ".join(f"{count} {words}" for words, count in counts.items())
    return f"{len(rows)} classes of {len({row.entry.package for row in rows})} packages; {len(ran)} run here: {parts}."


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Try all classes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default=",".join(MODULES), help="names on PyPI, with commas between them")
    parser.add_argument("--classes", default="", help="only these classes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="how many classes are tried at the same time")
    parser.add_argument("--all", action="store_true", help="all classes of the large collections, too")
    parser.add_argument(
        "--keep", type=Path, help="a file of results: what it has is not tried again, the rest is added"
    )
    parser.add_argument("--markdown", type=Path, help="write the table into this file")
    chosen = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["benchmarks.optimizer_list", "zerostep", "torch._dynamo"]
    )
    rows, only = list[Row](), set(filter(None, chosen.classes.split(",")))
    found = [entry for package in installed(chosen.packages.split(",")) for entry in entries(package, chosen.all)]
    wanted = [entry for entry in found if not only or entry.name in only]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for row in pool.map(functools.partial(run_or_recall, steps=chosen.steps, kept=chosen.keep), wanted):
            rows.append(row)
            print(f"{row.entry.package} {row.entry.name}: {row.ways} {row.note}", flush=True)
    text = f"{summary(rows)}\n\n{table(rows)}\n"
    print(text)
    if chosen.markdown is not None:
        chosen.markdown.write_text(text)


if __name__ == "__main__":
    main()
