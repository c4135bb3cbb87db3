#!/bin/bash
# One node of a run whose nodes come and go: launch/elastic.sh HOST:PORT configs/NAME.yaml [--set a.b=c ...]
# The same on every node; HOST is the one where they meet, which has to stay. Nodes may be added and may leave at any time.
# NODES (least:most), RANKS (of a node), RESTARTS, RUN_ID, ADDRESS (by which others reach this node) and RDZV (more of
# torchrun's --rdzv-conf) may be set.
set -euo pipefail
[[ $# -ge 2 ]] || { echo "usage: launch/elastic.sh HOST:PORT configs/NAME.yaml [--set a.b=c ...]" >&2; exit 2; }

endpoint=$1
shift
# A node is lost after 4 x 2 s without a sign, and ranks begin 3 s after the last node came; torchrun's own settings, 15 and
# 30 s, suit larger clusters. A store that it keeps for all meetings would not be found again. The agent is torchrun.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec .venv/bin/python -m megahead.distributed.agent --nnodes "${NODES:-1:64}" --nproc_per_node "${RANKS:-8}" \
    --max-restarts "${RESTARTS:-100}" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-megahead}" ${ADDRESS:+--local-addr "$ADDRESS"} \
    --rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=3${RDZV:+,$RDZV} \
    launch/pretrain.py --set parallel.elastic=true --config "$@"
