#!/bin/bash
# Ranks of one node, all started again when one dies, fails or hangs: launch/supervised.sh configs/NAME.yaml [--set a.b=c ...]
# The others notice (engine.timeout_seconds for one that hangs), end, and torchrun starts all of them anew; `--resume auto`,
# the default, goes on from the newest sound checkpoint. RANKS and RESTARTS may be set in the environment.
set -euo pipefail

exec .venv/bin/torchrun --nproc_per_node "${RANKS:-8}" --max-restarts "${RESTARTS:-10}" \
    launch/pretrain.py --config "$@"
