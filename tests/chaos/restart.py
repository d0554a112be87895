"""Jobs under `torchrun` that lose a rank, and go on from the last checkpoint."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.chaos.registry import Told, scenario
from tests.chaos.stage import Stage
from tests.docs.test_examples import ROOT, environment, losses, run_ranks
from tests.helpers.pool import HOST

DEADLINE = 120.0
STEPS, EVERY, DEATH = 6, 2, 5
SAVED = DEATH // EVERY * EVERY


def _torchrun(folder: Path, ranks: int, restarts: int, *more: str) -> tuple[int, str]:
    """Run the example under torchrun; its exit code, and what all ranks printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", HOST]
    counts = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    program = [str(ROOT / "examples" / "resume.py"), "--folder", str(folder), f"--steps={STEPS}", f"--every={EVERY}"]
    with subprocess.Popen(
        [*launcher, *counts, *program, *more],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=DEADLINE)
        except BaseException:
            process.terminate()  # and not kill: the launcher ends its ranks
            raise
    return process.returncode, printed


def _goes_on(before: str, after: str) -> str:
    """Compare the losses of the steps that were done twice; the first line of the second life."""
    first, second = losses(before), losses(after)
    assert list(second) == list(range(SAVED + 1, STEPS + 1)), after
    for step in sorted(set(first) & set(second)):
        assert abs(first[step] - second[step]) <= 1e-4 * abs(first[step]), (step, first[step], second[step])
    found = re.search(r"ranks \d+ start after step \d+", after)
    assert found is not None, after
    return found[0]


def _same_world(root: Path, world: int) -> list[str]:
    code, printed = _torchrun(root / "series", world, 1, f"--die-at={DEATH}", "--lose=rank")
    assert code == 0, printed
    before, marker, after = printed.partition(f"ranks {world} start after step {SAVED}\n")
    return [_goes_on(before, marker + after)] * world


def _smaller_world(root: Path, world: int) -> list[str]:
    """Without a launcher, which would end the others: they must end by themselves."""
    arguments = ["--folder", str(root / "series"), f"--steps={STEPS}", f"--every={EVERY}"]
    codes, before = run_ranks("resume", world, *arguments, f"--die-at={DEATH}", "--lose=rank")
    assert codes.count(-signal.SIGKILL) == 1 and 0 not in codes, before
    codes, after = run_ranks("resume", world - 1, *arguments)
    assert codes == [0] * (world - 1), after
    return [_goes_on(before, after)] * world


@scenario(
    "restarted-by-torchrun",
    "F27",
    Told(f"start after step {SAVED}", victim=f"start after step {SAVED}"),
    modes=("bare",),
    launch=_same_world,
    lost="the steps since the last checkpoint",
    quick=(("bare", 2),),
)
def _restarted(stage: Stage) -> None:
    """A rank is killed; torchrun ends the others and starts all of them again."""


@scenario(
    "restarted-on-fewer-ranks",
    "F27",
    Told(f"start after step {SAVED}", victim=f"start after step {SAVED}"),
    modes=("bare",),
    launch=_smaller_world,
    lost="the steps since the last checkpoint",
    worlds=(2,),  # with three the shares of a batch are uneven, and the mean of their losses is another number
)
def _restarted_smaller(stage: Stage) -> None:
    """A machine does not come back; the job goes on with one rank less."""
