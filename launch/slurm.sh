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
set -euo pipefail

# srun tells each process its rank; the address of the first node is ours to say.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Slurm sends its signal before the time limit to the ranks themselves: they save and exit 0.
run=$1
shift
trap : TERM # the ranks', not ours
status=0
rm -f "$run/ending.json"
srun --kill-on-bad-exit=1 .venv/bin/python launch/pretrain.py --config "$@" --set output_dir="$run" || status=$?

# RUN/ending.json is there only when the ranks ended by themselves, saved; what was stopped or died is queued again.
ending=$(sed -n 's/.*"ending": "\([a-z ]*\)".*/\1/p' "$run/ending.json" 2>/dev/null || true)
if [[ $ending == finished || $ending == "out of time" ]]; then
    exit 0
elif [[ $ending == stopped || ${SLURM_RESTART_COUNT:-0} -lt 20 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
