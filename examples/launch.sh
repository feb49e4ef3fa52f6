# What the launch scripts of this folder share. Each sources this file, fills the lists model, layout, batch, optimizer and data
# with flags of pretrain_gpt.py (and `telling`, if it wants other intervals than those below), and calls `launch`.
#
# A start has these parts:
#   1. a dry run of the very command line: wrong settings, and those that do not go with the checkpoint in RUN, end here, with exit
#      status 2, and the log says what the job takes;
#   2. a health check of all nodes, tools/check_cluster.py;
#   3. a supervisor on every node (launch_node.sh). It starts all ranks again when one fails, up to MAX_RESTARTS times in a row
#      without a newer state, and where MIN_NODES or MIN_RANKS allow it with fewer;
#   4. if it gives up, 2 and 3 again, as long as each attempt leaves a newer checkpoint than the one before. What another start
#      would meet again ends the job: wrong settings (2), numbers that are not finite (88).
# A start always goes on from the newest checkpoint of RUN.
#
# SIGTERM, SIGUSR1 and Ctrl-C make the ranks save and exit; a second one ends them at once. Under Slurm, SIGUSR1 (which
# `#SBATCH --signal=B:USR1@600` sends ten minutes before the time limit) also puts the job back into the queue.
#
# Variables of all scripts:
#   RUN            folder for checkpoints and curves, on a file system that all nodes see (runs/NAME)
#   NNODES         number of nodes, if it is not that of the script; under Slurm it is that of the job
#   HEAD, PORT     several nodes without Slurm: the name of one of them, the same on all, and a port on it (29500; the health check
#                  takes the next one)
#   DRY_RUN=1      only say what the job takes: needs no GPU, no data, and no other variable
#   PLAN=1         only look for faster layouts of the job, on CLUSTER (h100; tools/plan.py --cluster list); --plan says the same
#   SKIP_CHECK=1   no health check
#   MAX_RESTARTS   (3)
#   MIN_NODES      of several nodes, so many are enough to go on with when others are lost (all)
#   MIN_RANKS      on one node, so many ranks are (all)
#   LAUNCHER       supervisor, or torchrun (supervisor)
#   PYTHON         the Python to run (python, or that of the project's .venv where python lacks what is needed)

telling=(--log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10 --save-interval 1000)
missing=() wrong=() stops=0 requeue="" attempt=0

# need NAME WHAT: the variable NAME must be set, and is WHAT. All that are not set are told together, by `launch`.
need() {
    [[ -z ${!1-} ]] || return 0
    missing+=("$1 is not set: $2")
    printf -v "$1" '%s' "$1" # a dry run reads no file
}

# whole NAME LEAST MOST: the variable NAME, if it is set, must be such a whole number. All that are not are told together, by
# `launch`. (In arithmetic, bash takes a word for the name of a variable, and 010 for 8.)
whole() {
    local value=${!1-}
    [[ -z $value || ($value =~ ^(0|[1-9][0-9]{0,8})$ && $value -ge $2 && $value -le $3) ]] ||
        wrong+=("$1 must be a whole number from $2 to $3, but is '$value'")
}

# launch NODES RANKS_PER_NODE NAME [flags that are added to those of the lists, or count instead of them]
launch() {
    nodes=${SLURM_JOB_NUM_NODES:-${NNODES:-$1}} per_node=$2 run=${RUN:-runs/$3}
    shift 3
    [[ ${1-} != -h && ${1-} != --help ]] || usage
    whole NNODES 1 1000000
    whole MAX_RESTARTS 0 1000000
    whole MIN_NODES 1 "$nodes"
    whole MIN_RANKS 1 "$per_node"
    [[ ${LAUNCHER:-supervisor} =~ ^(supervisor|torchrun)$ ]] ||
        wrong+=("LAUNCHER must be supervisor or torchrun, but is '$LAUNCHER'")
    whole PORT 1 65534 # the health check takes the next one
    ((${#wrong[@]} == 0)) || fail 2 "$(printf '%s\n' "${wrong[@]}")"
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    source "$root/tools/find_python.sh"
    python=$(find_python "$root") || exit 2
    flags=("${model[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${data[@]}"
        "${telling[@]}" --tensorboard-dir "$run/tensorboard" --metrics-file "$run/metrics.jsonl"
        --save "$run/checkpoints" --load "$run/checkpoints" --keep-last 3 --async-save "$@")
    program=("$python" "$root/pretrain_gpt.py" "${flags[@]}")
    dry_run=("${program[@]}" --dry-run --world-size $((nodes * per_node)) --gpus-per-node "$per_node")
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
    [[ -z ${DRY_RUN-} ]] || exec "${dry_run[@]}"
    plan=("${program[@]}" --world-size $((nodes * per_node)) --plan-cluster "${CLUSTER:-h100}")
    [[ -z ${PLAN-} && " $* " != *" --plan "* ]] || exec "${plan[@]}" --plan
    ((${#missing[@]} == 0)) || fail 2 "$(printf '%s\n' "${missing[@]}")"
    find_head
    rehearse
    trap 'stops=$((stops + 1))' TERM INT
    trap 'stops=$((stops + 1)) requeue=1' USR1
    train
}

say() { echo "${0##*/}: $1" >&2; }

fail() { # STATUS WORDS
    say "$2"
    exit "$1"
}

usage() { # the comment at the top of the script
    awk 'NR > 1 && !/^#/ { exit } NR > 1 && !/^#SBATCH/ { sub(/^# ?/, ""); print }' "$0"
    exit 0
}

# The batch script of a Slurm job starts things on the nodes with srun. Anywhere else this is the only node, or one of several on
# which the same script is started.
find_head() {
    hosts="" batch_job="" port=${PORT:-29500}
    if [[ -n ${SLURM_JOB_ID-} && -z ${SLURM_STEP_NUM_NODES-} ]]; then
        batch_job=$SLURM_JOB_ID
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        head=${hosts%%$'\n'*} port=${PORT:-$((20000 + batch_job % 10000 * 2))} # jobs that share a node need ports of their own
    elif ((nodes == 1)); then
        head=localhost
    else
        head=${HEAD:-}
        [[ -n $head ]] || fail 2 "HEAD is not set: the name or address of one of the $nodes nodes, the same on all of them"
    fi
}

# Run a command on every node of the job, or on this one.
on_nodes() {
    if [[ -n $batch_job ]]; then
        # Where fewer nodes are enough, Slurm must not end the others with one that is lost.
        local alone=(--kill-on-bad-exit=1)
        ((${MIN_NODES:-$nodes} == nodes)) || alone=(--kill-on-bad-exit=0 --no-kill)
        interruptible srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none "${alone[@]}" "$@"
    else
        interruptible "$@"
    fi
}

# Run a command and pass on every request to stop. (While a command is in the foreground, bash would not hear of one.)
interruptible() {
    local child told=$stops status
    "$@" &
    child=$!
    while true; do
        status=0
        wait "$child" || status=$?
        ((stops > told)) || return "$status"
        told=$stops
        if [[ -n $batch_job ]]; then
            scancel --signal=TERM "$batch_job" || true # all job steps, but not this script
        else
            kill -TERM "$child" 2> /dev/null || true
        fi
    done
}

# The dry run, which also tells the memory that a GPU must have.
rehearse() {
    local plan
    plan=$(mktemp)
    "${dry_run[@]}" --dry-run-json "$plan" || exit # not worth a second try
    device_bytes=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["device_bytes"])' "$plan")
    rm -f "$plan"
}

check() {
    [[ -z ${SKIP_CHECK-} ]] || return 0
    on_nodes "$python" "$root/tools/check_cluster.py" --nodes "$nodes" --ranks-per-node "$per_node" \
        --head "$head:$((port + 1))" --expect "${hosts//$'\n'/,}" --device-bytes "$device_bytes" -- "${flags[@]}"
}

newest() { # the number of the newest checkpoint, if there is one
    cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2> /dev/null || true
}

# Attempts, until the run is done, was asked to stop, or gets nowhere.
train() {
    local before status
    while true; do
        attempt=$((attempt + 1)) before=$(newest) status=0
        check || status=$?
        ((stops == 0)) || break
        ((status == 0)) || fail "$status" "the health check found faults; SKIP_CHECK=1 starts without it"
        on_nodes bash "$root/examples/launch_node.sh" "$nodes" "$per_node" "$head:$port" "$run-$attempt" \
            "${program[@]}" || status=$?
        ((stops == 0 && status != 0 && status != 85)) || break # 85: the ranks were asked to stop
        ((status != 2 && status != 88)) || fail "$status" "another start would end in the same way: not started again"
        [[ $(newest) != "$before" ]] ||
            fail "$status" "failed (exit status $status) before it saved a checkpoint: not started again"
        say "failed (exit status $status) after checkpoint $(newest) was saved: starting again from there"
    done
    if [[ -n $requeue && -n $batch_job ]]; then
        [[ $(newest) != "$before" ]] || fail 1 "the time limit came before a checkpoint was saved: not put back into the queue"
        say "the time limit is near: back into the queue, to go on from checkpoint $(newest)"
        scontrol requeue "$batch_job"
    fi
    exit "$status"
}
