#!/bin/bash
# A run on a Ray cluster of its own, within a Slurm job: the first node is its head, and the run's driver is there, too.
#
#     sbatch --nodes=5 examples/cluster/slurm.sh dba3c --topology.workers 4 --topology.cores 12 --sampler.environments 32
#
# What follows the script is what follows `phalanx train`. The same command goes on with the same run (NAME), where the
# time limit of a job has stopped it.
#SBATCH --job-name=phalanx
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

NAME=${NAME:-slurm}
STORE=${STORE:-268435456} # bytes of each node's object store; the arrays of a gradient pass through it
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # nobody else may send work to this cluster
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ip=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
address=$ip:$PORT
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$ip" --port="$PORT" --num-cpus="$SLURM_CPUS_PER_TASK" \
    --object-store-memory="$STORE" --include-dashboard=false --disable-usage-stats --block &
for try in {1..60}; do
    ray status --address="$address" >/dev/null 2>&1 && break
    ((try < 60)) || { echo "the head of the cluster did not start at $address" >&2; exit 1; }
    sleep 1
done
if ((SLURM_JOB_NUM_NODES > 1)); then
    srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
        ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" \
        --object-store-memory="$STORE" --disable-usage-stats --block &
fi

if compgen -G "runs/$NAME/checkpoints/step-*" >/dev/null; then
    phalanx resume "runs/$NAME" --topology.address "$address" &
else
    phalanx train "${@:-dba3c}" --run.name "$NAME" --topology.address "$address" &
fi
run=$!
trap 'kill -TERM $run' TERM # the run writes a checkpoint and ends
wait $run || wait $run
