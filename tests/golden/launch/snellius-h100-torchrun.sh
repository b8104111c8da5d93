#!/bin/bash -l
# train job of nine-b on Snellius gpu_h100; written by windlass, which rewrites it at every launch.

#SBATCH --job-name=nine-b
#SBATCH --account=EUHPC_A01_006
#SBATCH --partition=gpu_h100
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=5-00:00:00
#SBATCH --chdir=/project
#SBATCH --output=/project/runs/nine-b/logs/%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@300
#SBATCH --ear=on
#SBATCH --ear-policy=monitoring
#SBATCH --ear-verbose=1

export USER=${USER:-$(id -un)}   # it may be missing in the job; cache paths and containers need it
# No `set -e`: the end of the job must be recorded even if training failed.
set -o pipefail
# Container settings of the submitting shell would be passed on and break the job: remove them.
for name in $(compgen -v | grep -E "^(SINGULARITY|APPTAINER|SINGULARITYENV|APPTAINERENV)_"); do unset "$name"; done
export PROJECT=${PROJECT:-EUHPC_A01_006}   # names the project's folders

# Container (apptainer)
image=/projects/0/x/windlass.sif
export APPTAINER_BIND=/projects,/scratch-shared

# Environment variables, each with its reason
export OMP_NUM_THREADS=1   # ranks of a node must not compete for cores
export HF_HUB_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export HF_DATASETS_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export TRANSFORMERS_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export WANDB_MODE=offline   # `windlass sync` uploads later, from a machine with internet
export WANDB_DIR=/project/runs/nine-b/trackers   # tracker files belong to the run folder

# Is there work left? This only reads the run folder and takes seconds.
apptainer exec --nv --pwd /project "$image" windlass link before /project/runs/nine-b
answer=$?
if [ "$answer" -eq 10 ]; then exit 0; fi
if [ "$answer" -ne 0 ]; then exit "$answer"; fi

# The token store goes to a node's own disk, as the recipe asks. A finished copy is marked; a store that has changed since is copied again.
export store=data/shards fast="$TMPDIR/windlass/shards"
srun --nodes=16 --ntasks=16 --ntasks-per-node=1 bash -c '{ [ -e "$fast/.staged" ] && [ -z "$(find "$store" -newer "$fast/.staged" -print -quit)" ]; } || { mkdir -p "$fast" && cp -r "$store/." "$fast/" && touch "$fast/.staged"; }' || exit 1

# Address for the ranks: the first node, and a port from the job id, so that two jobs never share one.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
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
    --cpu-bind=none \
    --distribution=block:block \
    apptainer exec --nv --pwd /project "$image" bash -c 'trap '"'"''"'"' USR1; exec "$@"' windlass torchrun "--nnodes=$SLURM_NNODES" --nproc-per-node=4 --rdzv-backend=c10d "--rdzv-id=$SLURM_JOB_ID" "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT" -m -- windlass.train.worker /project/runs/nine-b --store "$TMPDIR/windlass/shards"
code=$?

# Record how the job ended. srun can return 0 after a node failure, so the run folder decides, not the exit code.
apptainer exec --nv --pwd /project "$image" windlass link after /project/runs/nine-b --code "$code" --by "${ended_by:-none}"
answer=$?
if [ "$answer" -eq 75 ]; then
    # The next job of the chain, submitted without this job's SLURM_* variables, which would change it.
    mark=windlass:d371d5b9a4b3:after-$SLURM_JOB_ID
    for attempt in 1 2 3; do
        next=$(unset "${!SLURM_@}" "${!SRUN_@}"; cd /project &&
            sbatch --parsable --comment="$mark" /project/runs/nine-b/job.sh) && break
        sleep 20   # the controller may be unavailable for a moment, or its answer was lost after it queued the job
        next=$(squeue -h --me -t all -o "%i %k" | sed -n "s/^\([0-9]*\) .*$mark\$/\1/p" | head -n1)
        if [ -n "$next" ]; then break; fi
    done
    apptainer exec --nv --pwd /project "$image" windlass link next /project/runs/nine-b --job "$next"
fi
exit "$code"
