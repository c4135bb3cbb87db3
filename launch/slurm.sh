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
# Where the site asks for them, with one # instead of two:
##SBATCH --account=ACCOUNT --partition=PARTITION --qos=QOS
##SBATCH --mem=0 --exclusive
##SBATCH --output=logs/%x-%j.out
set -euo pipefail
[[ $# -ge 2 ]] || { echo "usage: sbatch launch/slurm.sh runs/NAME configs/NAME.yaml [--set a.b=c ...]" >&2; exit 2; }

# module load gcc                                        # a compiler, for engine.compile; torch brings CUDA and NCCL
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # where nodes have several networks
# export NCCL_DEBUG=INFO                                 # when ranks do not meet
export TRITON_CACHE_DIR=${TMPDIR:-/tmp}/triton-$SLURM_JOB_ID TORCHINDUCTOR_CACHE_DIR=${TMPDIR:-/tmp}/inductor-$SLURM_JOB_ID

# srun tells each process its rank; the address of the first node is ours to say.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it over by itself

# Slurm sends its signal before the time limit to the ranks themselves: they save and exit 0.
run=$1
shift
newest() { cat "$run/checkpoints/latest" 2>/dev/null || true; }
before=$(newest)
trap : TERM # the ranks', not ours
status=0
rm -f "$run/ending.json"
srun --kill-on-bad-exit=1 .venv/bin/python launch/pretrain.py --config "$@" --set output_dir="$run" || status=$?

# RUN/ending.json is there only when the ranks ended by themselves, saved. Queued again is what was stopped, and what died
# after it had saved something: what fails before, a wrong setting for one, would fail again.
ending=$(sed -n 's/.*"ending": "\([a-z ]*\)".*/\1/p' "$run/ending.json" 2>/dev/null || true)
if [[ $ending == finished || $ending == "out of time" ]]; then
    exit 0
elif [[ $ending == stopped || $(newest) != "$before" ]]; then
    # After scancel or a preemption the job does not run any more: Slurm decides about it. Of an array, this task alone.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    [[ $(squeue --noheader --jobs "$job" --format %T) != RUNNING ]] || scontrol requeue "$job"
fi
exit "$status"
