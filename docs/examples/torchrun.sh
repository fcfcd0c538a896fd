#!/bin/bash
# A worker for each GPU of some machines, in a folder that all share. The same command on each of them:
#
#     bash torchrun.sh HOST MACHINES model.toml model.pi
#
# HOST is one of the machines, where the others meet. GPUS in the environment is how many each has, 8 unless told.
set -e
torchrun --nnodes "$2" --nproc-per-node "${GPUS:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id pi-build --rdzv-endpoint "$1:29500" \
    -m pi_compile build "$3" -o "$4" --device cuda:all
