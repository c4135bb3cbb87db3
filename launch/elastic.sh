#!/bin/bash
# One node of a run whose nodes come and go: launch/elastic.sh HOST:PORT configs/NAME.yaml [--set a.b=c ...]
# Run it on every node; HOST is the rendezvous node, which must stay up. Other nodes may join or leave at any time.
# Optional variables: NODES (min:max), RANKS (of a node), RESTARTS, RUN_ID, ADDRESS (of this node for the others) and RDZV
# (more of torchrun's --rdzv-conf).
set -euo pipefail
[[ $# -ge 2 ]] || { echo "usage: launch/elastic.sh HOST:PORT configs/NAME.yaml [--set a.b=c ...]" >&2; exit 2; }

endpoint=$1
shift
# A wrong setting or a missing file ends here: torchrun would try it again and again.
plan=$(.venv/bin/python -m megahead pretrain --set parallel.elastic=true --config "$@" --world-size "${RANKS:-8}" --dry-run)
! grep -E '^files +missing: ' <<<"$plan" >&2 || exit 2

# A node is lost after 4 x 2 s without keep-alive, and ranks start 3 s after the last node joined; torchrun's defaults, 15
# and 30 s, suit larger clusters. A store shared by all rendezvous rounds would not survive them. The agent is torchrun's.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec .venv/bin/python -m megahead.distributed.agent --nnodes "${NODES:-1:64}" --nproc_per_node "${RANKS:-8}" \
    --max-restarts "${RESTARTS:-100}" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-megahead}" ${ADDRESS:+--local-addr "$ADDRESS"} \
    --rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=3${RDZV:+,$RDZV} \
    launch/pretrain.py --set parallel.elastic=true --config "$@"
