#!/bin/bash
# Several runs with different settings, one per task: sbatch --array=1-3 launch/sweep.sh configs/NAME.yaml launch/sweep.txt
# Each task is one node; a task that is stopped by the time limit requeues itself and resumes. A run of another sweep with
# the same name is refused.
#SBATCH --job-name=megahead-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Options that your site may require: see launch/slurm.sh.
set -euo pipefail
[[ $# -eq 2 && -n ${SLURM_ARRAY_TASK_ID:-} ]] || { echo "usage: sbatch --array=1-N launch/sweep.sh configs/NAME.yaml launch/sweep.txt" >&2; exit 2; }

refuse() { echo "error: $1" >&2; exit 2; }

config=$1
lines=$(tr -d '\r' <"$2" | grep -vE '^[[:space:]]*(#|$)' || true)
read -r -a line <<<"$(sed -n "${SLURM_ARRAY_TASK_ID}p" <<<"$lines")"
name=${line[0]:?line $SLURM_ARRAY_TASK_ID of $2 must hold a run, but is missing}
[[ ! " ${line[*]}" =~ \ [\"\'] ]] || refuse "options of $2 must have no quotes around them, but are ${line[*]} instead; leave quotes and spaces out."
times=$(awk '{print $1}' <<<"$lines" | grep -cxF -- "$name")
[[ $times == 1 ]] || refuse "runs of $2 must have names of their own, but $name is there $times times; rename all but one."

# RUN/sweep.txt has the line and the array task that train there; of two that start at once only one can create it.
run=runs/$name task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
claim() { printf '%s\n' "$config ${line[*]}" "$task" >"$run/sweep.txt"; }
mkdir -p "$run"
if ! (set -o noclobber && claim) 2>/dev/null; then
    { read -r begun && read -r other; } <"$run/sweep.txt"
    if [[ $other != "$task" && -n $(squeue --noheader --jobs "$other" --format %T 2>/dev/null) ]]; then
        refuse "$run must be trained by one job, but $other is at it; wait for it, scancel it, or rename this run."
    elif [[ $begun != "$config ${line[*]}" && -d $run/checkpoints ]]; then
        refuse "$run must be trained as it was begun ($begun), but is given $config ${line[*]} instead; rename this run."
    fi
    claim
fi
exec bash launch/slurm.sh "$run" "$config" --set name="'$name'" "${line[@]:1}"
