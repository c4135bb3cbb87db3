#!/bin/bash
# Ranks of one node, restarted when one dies, fails or hangs: launch/supervised.sh configs/NAME.yaml [--set a.b=c ...]
# The others exit (after engine.timeout_seconds if it hangs), and torchrun restarts all; `--resume auto`, the default,
# continues from the newest valid checkpoint. RANKS and RESTARTS may be set in the environment.
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: launch/supervised.sh configs/NAME.yaml [--set a.b=c ...]" >&2; exit 2; }

export LAUNCH_ID=${LAUNCH_ID:-$HOSTNAME-$$-$(date +%s)} # `--resume` DIR or never applies until this launch has saved

# A wrong setting or a missing file ends here: torchrun would try it again and again.
plan=$(.venv/bin/python launch/pretrain.py --config "$@" --world-size "${RANKS:-8}" --dry-run)
! grep -E '^files +missing: ' <<<"$plan" >&2 || exit 2
exec .venv/bin/torchrun --nproc_per_node "${RANKS:-8}" --max-restarts "${RESTARTS:-10}" \
    launch/pretrain.py --config "$@"
