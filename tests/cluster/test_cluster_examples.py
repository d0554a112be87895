"""The files of examples/cluster: each is checked, and its command line starts local ranks that train and resume.

Slurm's own commands are stood in for by two that do on this machine what Slurm does on many.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.helpers.pool import HOST, LOOPBACK
from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh"))
DEADLINE = 120.0
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "requeued $2"; else echo "$3"; fi
"""

pytestmark = pytest.mark.timeout(3 * DEADLINE)


def local() -> dict[str, str]:
    """For local ranks of one thread, on the loopback interface, without GPUs."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    names = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": paths}
    # torchrun takes options from such variables; where the machine's name does not resolve, it needs this one.
    return {**os.environ, **names, "PET_LOCAL_ADDR": HOST, "INTERFACE": LOOPBACK, "GLOO_SOCKET_IFNAME": LOOPBACK}


def slurm(folder: Path, ranks: int, **more: str) -> dict[str, str]:
    """What a job of Slurm finds on one host, with stand-ins for Slurm's commands."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    given = local()
    return {
        **given,
        "PATH": os.pathsep.join([str(commands), given["PATH"]]),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": HOST,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_SUBMIT_DIR": str(folder),
        "PORT": str(free_port()),
        **more,
    }


def run(command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def printed(done: "subprocess.CompletedProcess[str]") -> tuple[str, float]:
    """Which steps were done, and the loss of the last."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(steps \d+ to \d+), loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    return found[1], float(found[2])


def manifests() -> dict[str, dict[str, Any]]:
    """The objects for Kubernetes, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def container() -> dict[str, Any]:
    [found] = manifests()["Job"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def option(name: str) -> str:
    """The value of an option in the command of the container."""
    [found] = [word for word in container()["command"] if word.startswith(f"--{name}=")]
    return str(found.partition("=")[2])


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_scripts_are_sound(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)
    lines = (FOLDER / name).read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert options and max(options) < min(commands), "Slurm reads options before the first command only"


def test_every_launcher_trains_from_where_the_one_before_has_stopped(tmp_path: Path) -> None:
    """One torchrun per host, then one task per rank, then the command of the pod, there with one rank."""
    checkpoints = tmp_path / "checkpoints"
    tasks = slurm(tmp_path, 1, SLURM_GPUS_ON_NODE="2")
    first = run(["bash", str(FOLDER / "slurm_torchrun.sh"), "--steps", "5"], tasks)
    assert printed(first)[0] == "steps 0 to 5"
    second = run(["bash", str(FOLDER / "slurm_ranks.sh"), "--steps", "10"], slurm(tmp_path, 2))
    assert printed(second)[0] == "steps 5 to 10"
    third = run(pod_command(checkpoints, 15), local())
    assert printed(third)[0] == "steps 10 to 15"
    assert printed(third)[1] == pytest.approx(plain_loss(15), abs=2e-5)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-10", "step-15"]


def plain_loss(steps: int) -> float:
    """The loss of the last step of the same training in this process, without zerostep."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
    return loss.item()


def pod_command(checkpoints: Path, steps: int) -> list[str]:
    """What the container runs, for one host with one rank and other paths."""
    changes = {
        "nnodes": "1",
        "nproc-per-node": "1",
        "rdzv-endpoint": f"{HOST}:{free_port()}",
        "folder": str(checkpoints),
        "steps": str(steps),
    }
    words = container()["command"]
    for name, value in changes.items():
        words = [word.replace(f"--{name}={option(name)}", f"--{name}={value}") for word in words]
    return words


def test_a_task_that_fails_has_its_job_queued_again_but_not_for_ever(tmp_path: Path) -> None:
    slurm(tmp_path, 2)
    (tmp_path / "commands" / "python").symlink_to(shutil.which("false") or "false")
    for before, expected in (("0", "requeued 17\n"), ("3", "")):
        variables = slurm(tmp_path, 2, SLURM_RESTART_COUNT=before)
        done = run(["bash", str(FOLDER / "slurm_ranks.sh")], variables)
        assert (done.returncode, done.stdout) == (1, expected), done.stderr


def test_pods_find_each_other_and_share_their_checkpoints() -> None:
    job, service, claim = (manifests()[kind] for kind in ("Job", "Service", "PersistentVolumeClaim"))
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(option("nnodes"))
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert option("rdzv-endpoint") == f"{name}-0.{pod['subdomain']}:29400"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    [volume] = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounts = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
    assert mounts[volume["name"]] == option("folder")
    assert int(option("nproc-per-node")) == container()["resources"]["limits"]["nvidia.com/gpu"]
