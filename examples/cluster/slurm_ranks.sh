#!/bin/bash
# One task per rank, without torchrun; a job that fails is queued again, and resumes: sbatch slurm_ranks.sh --steps 2000
#SBATCH --job-name=zerostep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
# The ranks of a host must have numbers in a row: with "cyclic", a mesh would divide the state across hosts.
#SBATCH --distribution=block:block

set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${PORT:-29400} WORLD_SIZE=$SLURM_NTASKS
export GLOO_SOCKET_IFNAME=${INTERFACE:-eth0} NCCL_SOCKET_IFNAME=${INTERFACE:-eth0}
export FOLDER=${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints}

# --gpus-per-node, and not --gpus-per-task: each rank picks its GPU by LOCAL_RANK, so it must see all of the host.
# --kill-on-bad-exit=1: a rank cannot come back by itself, so the job ends with it, at once.
# shellcheck disable=SC2016  # each task expands its own variables
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python examples/cluster/train.py --folder "$FOLDER" "$@"
' rank "$@" || {
    # At most three times: a program that fails by itself would fail for ever.
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit 1
}
