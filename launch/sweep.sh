#!/bin/bash
# Several runs that differ in some settings, one a task: sbatch --array=1-3 launch/sweep.sh configs/NAME.yaml launch/sweep.txt
# Each task is one node; a task that was stopped by the time limit queues itself again and resumes.
#SBATCH --job-name=megahead-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# What the site asks for: as in launch/slurm.sh.
set -euo pipefail
[[ $# -eq 2 ]] || { echo "usage: sbatch --array=1-N launch/sweep.sh configs/NAME.yaml launch/sweep.txt" >&2; exit 2; }

config=$1
read -r -a line <<<"$(grep -vE '^(#|[[:space:]]*$)' "$2" | sed -n "${SLURM_ARRAY_TASK_ID}p")"
name=${line[0]:?line $SLURM_ARRAY_TASK_ID of $2 must hold a run, but is missing}
exec bash launch/slurm.sh "runs/$name" "$config" --set name="$name" "${line[@]:1}"
