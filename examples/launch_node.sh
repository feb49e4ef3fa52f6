#!/usr/bin/env bash
# One node's part of a job: a supervisor with the ranks of this node (docs/survival.md). Started by launch.sh, under Slurm once on
# every node.
#
#   launch_node.sh NODES RANKS_PER_NODE HEAD:PORT NAME PYTHON PROGRAM [flags]
#
# SIGTERM, SIGUSR1 and Ctrl-C make the ranks save and exit; a second one ends them at once. MIN_NODES and MIN_RANKS (on one node)
# say with how few the job goes on when others are lost. LAUNCHER=torchrun starts the ranks by torchrun, which always needs all.
set -euo pipefail

nodes=$1 per_node=$2 endpoint=$3 name=$4 python=$5
shift 5

# The allocator of CUDA memory grows its segments instead of adding new ones, so that hardly any of it is lost in gaps. (What
# the user has set counts, also by the name that torch gave it before 2.9.)
if [[ -z ${PYTORCH_CUDA_ALLOC_CONF-} ]]; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi

restarts=(--max-restarts "${MAX_RESTARTS:-3}")
if [[ ${LAUNCHER:-supervisor} == supervisor ]]; then
    meeting=(--nnodes "${MIN_NODES:-$nodes}:$nodes" --meet "$endpoint" --run-id "$name")
    ((nodes > 1)) || meeting=(--elastic "${MIN_RANKS:-$per_node}:$per_node")
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    exec "$python" -m megatron_lab.resilience.supervisor "${meeting[@]}" --nproc-per-node "$per_node" "${restarts[@]}" "$@"
fi

# A torchrun that gets SIGTERM kills ranks that have not ended after 30 s, which may be in the middle of a save, and after SIGTERM
# to its ranks it may start them again. So it is told to take no notice of signals but SIGUSR2, and the ranks get them from here,
# until they have saved and ended.
meeting=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$name")
((nodes > 1)) || meeting=(--standalone)
# Otherwise ranks that torchrun starts again would find in its store the addresses of those that have ended, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Ranks that any other start would end like (wrong settings, numbers that are not finite) write their code behind 16 bytes of this
# file. torchrun would start them again, so it is ended.
MEGATRON_LIFE_FILE=$(mktemp)
export MEGATRON_LIFE_FILE
trap 'rm -f "$MEGATRON_LIFE_FILE"' EXIT
final() { od -A n -t d8 -j 16 -N 8 "$MEGATRON_LIFE_FILE" 2> /dev/null | tr -d ' \n' || true; }
stops=0
trap 'stops=$((stops + 1))' TERM INT USR1
(
    trap '' TERM INT HUP
    exec "$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$per_node" "${restarts[@]}" \
        --signals-to-handle SIGUSR2 "$@"
) &
agent=$!

while ((stops == 0)) && kill -0 "$agent" 2> /dev/null; do
    [[ -z $(final) ]] || kill -USR2 "$agent" 2> /dev/null || true
    sleep 0.5 &
    wait "$!" || true
done
if ((stops == 0)); then
    status=0
    wait "$agent" || status=$?
    code=$(final)
    exit "${code:-$status}"
fi

# Where torchrun has no ranks, because it waits for other nodes, there is nothing to save.
ranks=" $(pgrep -P "$agent" | tr '\n' ' ' || true)" without_ranks=0
while kill -0 "$agent" 2> /dev/null; do
    again="" now=$(pgrep -P "$agent" || true)
    for rank in $now; do
        [[ $ranks == *" $rank "* ]] || again=1
    done
    [[ -n $now ]] && without_ranks=0 || without_ranks=$((without_ranks + 1))
    if ((stops > 1 || without_ranks > 20)) || [[ -n $again ]]; then
        kill -USR2 "$agent" 2> /dev/null || true
    elif [[ -n $now ]]; then # again and again: a rank that is only starting Python hears nothing yet
        kill -TERM $now 2> /dev/null || true
    fi
    sleep 0.5 &
    wait "$!" || true
done
status=0
wait "$agent" || status=$?
exit "$status"
