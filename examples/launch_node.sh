#!/usr/bin/env bash
# Run the ranks of this node under a supervisor (docs/survival.md). launch.sh starts this script, in a Slurm job once on every node.
#
#   launch_node.sh NODES RANKS_PER_NODE HEAD:PORT NAME PYTHON PROGRAM [flags]
#
# On SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C the ranks save a checkpoint and exit. A second signal ends the ranks at once. If nodes or
# ranks are lost, the job continues with at least MIN_NODES nodes, or on one node with at least MIN_RANKS ranks. LAUNCHER=torchrun
# starts the ranks with torchrun, which always needs all ranks.
set -euo pipefail

nodes=$1 per_node=$2 endpoint=$3 name=$4 python=$5
shift 5

# Let the CUDA caching allocator grow its segments instead of adding new ones, which reduces fragmentation. A value that the user
# has set takes precedence, also in the variable that torch used before version 2.9.
if [[ -z ${PYTORCH_CUDA_ALLOC_CONF-} ]]; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi

restarts=(--max-restarts "${MAX_RESTARTS:-3}")
if [[ ${LAUNCHER:-supervisor} == supervisor ]]; then
    rendezvous=(--nnodes "${MIN_NODES:-$nodes}:$nodes" --meet "$endpoint" --run-id "$name")
    ((nodes > 1)) || rendezvous=(--elastic "${MIN_RANKS:-$per_node}:$per_node")
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    exec "$python" -m megatron_lab.resilience.supervisor "${rendezvous[@]}" --nproc-per-node "$per_node" "${restarts[@]}" "$@"
fi

# On SIGTERM, torchrun kills all ranks that do not exit within 30 s, possibly while they save. After a SIGTERM to its ranks, it may
# also restart them. Therefore torchrun handles only SIGALRM, and this script sends the signals to the ranks until they have saved
# and exited.
rendezvous=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$name")
((nodes > 1)) || rendezvous=(--standalone)
# Otherwise ranks that torchrun restarts would find the addresses of the ended ranks in torchrun's store, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A rank with a fault that a restart cannot mend (invalid settings, a loss that is not finite) writes its exit status to this file,
# at offset 16. torchrun would restart the ranks, so this script ends torchrun.
MEGATRON_LIFE_FILE=$(mktemp)
export MEGATRON_LIFE_FILE
trap 'rm -f "$MEGATRON_LIFE_FILE"' EXIT
final() { od -A n -t d8 -j 16 -N 8 "$MEGATRON_LIFE_FILE" 2> /dev/null | tr -d ' \n' || true; }
stops=0
stop() { # one Ctrl-C comes from the terminal and from launch.sh
    ((stops > 0 && SECONDS - stopped_at < 2)) || stops=$((stops + 1)) stopped_at=$SECONDS
}
trap stop TERM INT HUP XCPU USR1 USR2
(
    trap '' TERM INT HUP XCPU USR1 USR2
    exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$per_node" "${restarts[@]}" \
        --signals-to-handle SIGALRM "$@"
) &
agent=$!

while ((stops == 0)) && kill -0 "$agent" 2> /dev/null; do
    [[ -z $(final) ]] || kill -ALRM "$agent" 2> /dev/null || true
    sleep 0.5 &
    wait "$!" || true
done
if ((stops == 0)); then
    status=0
    wait "$agent" || status=$?
    code=$(final)
    exit "${code:-$status}"
fi

# While torchrun has no ranks, because it waits for other nodes, there is nothing to save.
ranks=" $(pgrep -P "$agent" | tr '\n' ' ' || true)" without_ranks=0
while kill -0 "$agent" 2> /dev/null; do
    has_restarted="" now=$(pgrep -P "$agent" || true)
    for rank in $now; do
        [[ $ranks == *" $rank "* ]] || has_restarted=1
    done
    [[ -n $now ]] && without_ranks=0 || without_ranks=$((without_ranks + 1))
    if ((stops > 1 || without_ranks > 20)) || [[ -n $has_restarted ]]; then
        kill -ALRM "$agent" 2> /dev/null || true
    elif [[ -n $now ]]; then # repeatedly: a rank that still starts Python does not handle signals yet
        kill -TERM $now 2> /dev/null || true
    fi
    sleep 0.5 &
    wait "$!" || true
done
status=0
wait "$agent" || status=$?
exit "$status"
