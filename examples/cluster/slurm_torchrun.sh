#!/bin/bash
# One torchrun per host starts the ranks, and starts them again when one dies: sbatch slurm_torchrun.sh --steps 2000
#SBATCH --job-name=zerostep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
# Without it Slurm ends the whole job with the first host that fails, and nobody is left to go on.
#SBATCH --no-kill

set -euo pipefail

first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
folder=${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints}

# The interface between hosts, if they have several: a wrong one connects within a host, and hangs between hosts.
export GLOO_SOCKET_IFNAME=${INTERFACE:-eth0} NCCL_SOCKET_IFNAME=${INTERFACE:-eth0}
# Ranks that are started again must not find the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --kill-on-bad-exit=0: a host that fails must not take the others along. The first host must be among those that stay.
srun --kill-on-bad-exit=0 torchrun \
    --nnodes="1:$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    --max-restarts=3 \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first_host:${PORT:-29400}" \
    --rdzv-conf="last_call_timeout=${LAST_CALL:-60}" \
    examples/cluster/train.py --folder "$folder" "$@"
