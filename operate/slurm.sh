#!/bin/bash
#SBATCH --job-name=fedapps
#SBATCH --nodes=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch slurm.sh --methods fedavg,scaffold --seeds 0,1,2 --output /scratch/me/mine
#
# Two minutes before the time is over the command ends in order, with a checkpoint to go on from,
# and the job queues itself again. A job that is queued again continues its runs.
set -u
export FEDAPPS_DATA_DIR="${FEDAPPS_DATA_DIR:-$HOME/data}"
export OMP_NUM_THREADS=1
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1

command=
stopped=
trap 'stopped=1; [ -z "$command" ] || kill -TERM "$command"' TERM
fedapps run "$@" &
command=$!
[ -z "$stopped" ] || kill -TERM "$command"  # the signal came before the command had a number
wait "$command"
code=$?
if [ -n "$stopped" ]; then  # the signal ended that wait, not yet the command
    wait "$command"
    code=$?
fi
if [ "$code" -eq 143 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
