#!/bin/bash -l
# train job of nine-b on JUPITER Booster; written by windlass, which rewrites it at every launch.

#SBATCH --job-name=nine-b
#SBATCH --account=jup-llm
#SBATCH --partition=booster
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --gres=gpu:4
#SBATCH --time=0-12:00:00
#SBATCH --chdir=/project
#SBATCH --output=/project/runs/nine-b/logs/%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@300

export USER=${USER:-$(id -un)}   # it may be missing in the job; cache paths and containers need it
# No `set -e`: the end of the job must be recorded even if training failed.
set -o pipefail
# Container settings of the submitting shell would be passed on and break the job: remove them.
for name in $(compgen -v | grep -E "^(SINGULARITY|APPTAINER|SINGULARITYENV|APPTAINERENV)_"); do unset "$name"; done
export PROJECT=${PROJECT:-jup-llm}   # names the project's folders

# Python
source /project/venv/bin/activate

# Environment variables, each with its reason
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"   # srun no longer inherits it (SLURM 22.05): one core per task otherwise
export OMP_NUM_THREADS=72   # ranks of a node must not compete for cores
export NCCL_SOCKET_IFNAME=ib0   # bootstrap over InfiniBand
export GLOO_SOCKET_IFNAME=ib0   # the same for gloo
export HF_HUB_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export HF_DATASETS_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export TRANSFORMERS_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export WANDB_MODE=offline   # `windlass sync` uploads later, from a machine with internet
export WANDB_DIR=/project/runs/nine-b/trackers   # tracker files belong to the run folder

# Is there work left? This only reads the run folder and takes seconds.
windlass link before /project/runs/nine-b
answer=$?
if [ "$answer" -eq 10 ]; then exit 0; fi
if [ "$answer" -ne 0 ]; then exit "$answer"; fi

# Address for the ranks: the first node, and a port from the job id, so that two jobs never share one.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)i   # the trailing i is its name on the fast network
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# When this job ends, so that training saves in time. SLURM before 23.02 does not set it: ask once.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null) && export SLURM_JOB_END_TIME
fi

# SLURM sends SIGUSR1 to every rank 5 min before the end (no save has been timed yet): the ranks save and stop with code 75.
# The trap only notes a SIGTERM, so that this shell stays alive to record how the job ended.
ended_by=
trap 'ended_by=TERM' TERM
srun \
    --wait=120 \
    python -m windlass.train.worker /project/runs/nine-b
code=$?

# Record how the job ended. srun can return 0 after a node failure, so the run folder decides, not the exit code.
windlass link after /project/runs/nine-b --code "$code" --by "${ended_by:-none}"
answer=$?
exit "$code"
