#!/usr/bin/env bash
# A run and its workers on the nodes of one allocation:
#
#   sbatch --nodes 3 containers/slurm.sh recipe.toml runs/mine
#
# The first node trains, with its GPUs if it has some; every other one plays episodes. Run again
# with the same folder, it goes on where it was, also after the time limit of the job.
#SBATCH --job-name turnwright
#SBATCH --ntasks-per-node 1
#SBATCH --signal TERM@60
#SBATCH --requeue
set -euo pipefail

recipe=${1:?a recipe}
out=${2:?a folder for the run, which every node sees}
port=${TURNWRIGHT_PORT:-7070}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
others=$((SLURM_JOB_NUM_NODES - 1))

umask 077
: "${TURNWRIGHT_WORKER_TOKEN:=$(head -c 24 /dev/urandom | base64 | tr -d '+/=')}"
export TURNWRIGHT_WORKER_TOKEN

if ((others > 0)); then
    srun --nodes "$others" --ntasks "$others" --exclude "$first" \
        turnwright worker --join "http://$first:$port" &
fi

if [[ -e $out/config.json ]]; then
    what=(--resume "$out")
else
    what=("$recipe" --out "$out")
fi
srun --nodes 1 --ntasks 1 --nodelist "$first" \
    turnwright train "${what[@]}" --scale.listen "0.0.0.0:$port"
