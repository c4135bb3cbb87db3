#!/bin/bash
# One run on several nodes under Slurm: sbatch launch/slurm.sh runs/NAME configs/NAME.yaml [--set a.b=c ...]
#SBATCH --job-name=megahead
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Options that your site may require; remove one #:
##SBATCH --account=ACCOUNT --partition=PARTITION --qos=QOS
##SBATCH --mem=0 --exclusive
##SBATCH --output=logs/%x-%j.out    (mkdir logs before)
set -euo pipefail
[[ $# -ge 2 && -n ${SLURM_JOB_ID:-} ]] || { echo "usage: sbatch launch/slurm.sh runs/NAME configs/NAME.yaml [--set a.b=c ...]" >&2; exit 2; }

# module load gcc                                        # a compiler, for engine.compile; torch brings CUDA and NCCL
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # where nodes have several networks
# export NCCL_DEBUG=INFO                                 # when ranks do not connect
export TRITON_CACHE_DIR=${TMPDIR:-/tmp}/triton-$SLURM_JOB_ID TORCHINDUCTOR_CACHE_DIR=${TMPDIR:-/tmp}/inductor-$SLURM_JOB_ID

# srun sets the rank of each process; the address of the first node is set here.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it
export LAUNCH_ID=$SLURM_JOB_ID                 # `--resume` DIR or never applies until this job has saved

# Before the time limit Slurm signals the ranks, which save and exit 0.
run=$1
shift
newest() { cat "$run/checkpoints/latest" 2>/dev/null || true; }
before=$(newest)
trap : TERM # for the ranks; this script goes on
status=0
rm -f "$run/ending.json"
srun --kill-on-bad-exit=1 .venv/bin/python launch/pretrain.py --config "$@" --set output_dir="'$run'" || status=$?

# RUN/ending.json exists only if the ranks saved and exited by themselves. A job is requeued if it was stopped, or died after
# saving a checkpoint: one that fails before that, as by a wrong setting, would fail again.
ending=$(sed -n 's/.*"ending": "\([a-z ]*\)".*/\1/p' "$run/ending.json" 2>/dev/null || true)
if [[ $ending == finished || $ending == "out of time" ]]; then
    exit 0
elif [[ $ending == stopped || $(newest) != "$before" ]]; then
    # After scancel or a preemption the job is not RUNNING: leave it to Slurm. In an array, only this task is requeued.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    [[ $(squeue --noheader --jobs "$job" --format %T) != RUNNING ]] || scontrol requeue "$job"
fi
exit "$status"
