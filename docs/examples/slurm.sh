#!/bin/bash
# A worker in each job of an array, in a folder that all machines share:
#
#     sbatch slurm.sh model.toml model.pi
#SBATCH --job-name=pi-build
#SBATCH --array=0-31
#SBATCH --cpus-per-task=1
#SBATCH --mem=8G
#SBATCH --time=8:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#SBATCH --output=%x-%A-%a.log

# A minute before its time is over a job asks to be started again. It then goes on from what is done.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
pi-compile build "$1" -o "$2" &
worker=$!
wait "$worker"
code=$?
while [ "$code" -eq 138 ]; do # 128 + USR1: the signal ended the wait, not the worker
    wait "$worker"
    code=$?
done
exit "$code"
