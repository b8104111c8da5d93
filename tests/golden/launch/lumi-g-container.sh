#!/bin/bash -l
# train job of nine-b on LUMI-G; written by windlass, which rewrites it at every launch.

#SBATCH --job-name=nine-b
#SBATCH --account=project_462000123
#SBATCH --partition=standard-g
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --mem=480G
#SBATCH --time=2-00:00:00
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
export PROJECT=${PROJECT:-project_462000123}   # names the project's folders

# Container (singularity)
image=/appl/local/laifs/containers/lumi-multitorch-latest.sif
export SINGULARITY_BIND=/var/spool/slurmd,/opt/cray,/usr/lib64/libcxi.so.1,/usr/lib64/libjansson.so.4,/pfs,/scratch,/projappl,/project,/flash,/appl

# Environment variables, each with its reason
export OMP_NUM_THREADS=7   # ranks of a node must not compete for cores
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3   # bootstrap over Slingshot, not the management network
export NCCL_NET_GDR_LEVEL=3   # GPU-direct RDMA: the network cards are attached to the GPUs
export FI_CXI_DEFAULT_CQ_SIZE=131072   # avoids 'Cassini Event Queue overflow' at scale
export FI_CXI_DISABLE_CQ_HUGETLB=1   # the same
export CXI_FORK_SAFE=1   # data-loader workers fork
export CXI_FORK_SAFE_HP=1   # the same, for huge pages
export MIOPEN_USER_DB_PATH="/tmp/${USER:-windlass}-miopen-${SLURM_JOB_ID}"   # MIOpen's sqlite cache deadlocks on Lustre
export MIOPEN_CUSTOM_CACHE_DIR="/tmp/${USER:-windlass}-miopen-${SLURM_JOB_ID}"   # the same
export PMI_NO_PREINITIALIZE=y   # start-up at 512 nodes and more
export SINGULARITYENV_BASH_ENV=''   # Lmod's start file prints errors inside the container
export SINGULARITYENV_TORCH_DIST_INIT_BARRIER=1   # ranks start unevenly
export HF_HUB_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export HF_DATASETS_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export TRANSFORMERS_OFFLINE=1   # nothing is fetched in a job: a hub time-out costs minutes per rank
export WANDB_MODE=offline   # `windlass sync` uploads later, from a machine with internet
export WANDB_DIR=/project/runs/nine-b/trackers   # tracker files belong to the run folder

# Is there work left? This only reads the run folder and takes seconds.
singularity exec --rocm --pwd /project "$image" bash -c '$WITH_CONDA; exec "$@"' windlass windlass link before /project/runs/nine-b
answer=$?
if [ "$answer" -eq 10 ]; then exit 0; fi
if [ "$answer" -ne 0 ]; then exit "$answer"; fi

# The token store is on the fast file system (tokenised shards, hot images): `windlass stage` copied it there in a CPU job before this one.
fast="/flash/$PROJECT/windlass/shards"
if [ ! -e "$fast/.staged" ]; then
    echo "windlass: no complete token store in $fast: launch the run again, which copies it" >&2
    exit 1
fi

# Folders of this job on every node
srun --nodes=16 --ntasks=16 --ntasks-per-node=1 install -d -m 700 "$MIOPEN_USER_DB_PATH" "$MIOPEN_CUSTOM_CACHE_DIR" || exit 1

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
    --cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000 \
    singularity exec --rocm --pwd /project "$image" bash -c '$WITH_CONDA; exec "$@"' windlass python -m windlass.train.worker /project/runs/nine-b --store "/flash/$PROJECT/windlass/shards"
code=$?

# Record how the job ended. srun can return 0 after a node failure, so the run folder decides, not the exit code.
singularity exec --rocm --pwd /project "$image" bash -c '$WITH_CONDA; exec "$@"' windlass windlass link after /project/runs/nine-b --code "$code" --by "${ended_by:-none}"
answer=$?
exit "$code"
