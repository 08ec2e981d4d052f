#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --time=24:00:00
# A run over the nodes of a Slurm job: sbatch launch/slurm.sh CONFIG.yaml [section.key=value …]
#
# `ray symmetric-run` starts Ray on every node, runs the command on the first, and stops Ray when it ends. srun carries the
# environment to all nodes, and with it the token that whoever connects to Ray must show. With `sbatch --requeue` a job that
# was preempted goes on from its last checkpoint, on other nodes, too.
set -eu
[ $# -gt 0 ] || { echo "usage: sbatch launch/slurm.sh CONFIG.yaml [section.key=value …]" >&2; exit 2; }
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(openssl rand -hex 32)}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
gpus=${SLURM_GPUS_ON_NODE:-8}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk '{print $1; exit}'):6379
pools=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/.*/$gpus/" | paste -sd ,)
exec srun ray symmetric-run --address "$address" --min-nodes "$SLURM_NNODES" -- \
    tandem train "$@" cluster.type=ray "cluster.address=$address" "placement.pools.main=[$pools]" trainer.resume=true
