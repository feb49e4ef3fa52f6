# Functions that the launch scripts of this folder share. Each script sources this file, fills the lists model, layout, batch,
# optimizer and data with flags of pretrain_gpt.py, and calls `launch`. A script that wants other intervals for logs, evaluation and
# checkpoints than those below also sets the list logging.
#
# `launch` does the following:
#   1. a dry run of the command line. It reports the memory and the schedule of the job. Invalid settings, and settings that do not
#      fit the checkpoint in RUN, end the script here with exit status 2;
#   2. a health check of all nodes (tools/check_cluster.py);
#   3. a supervisor on every node (launch_node.sh). If a rank fails, the supervisor restarts all ranks, at most MAX_RESTARTS times
#      in a row without a newer checkpoint. MIN_NODES and MIN_RANKS allow a restart with fewer nodes or ranks;
#   4. if the supervisor gives up, steps 2 and 3 again, as long as each attempt saved a newer checkpoint than the attempt before.
#      Faults that a restart cannot mend end the job: invalid settings (exit status 2) and a loss or gradient that is not
#      finite (exit status 88).
# A run always resumes from the newest checkpoint in RUN.
#
# On SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C the ranks save a checkpoint and exit. A second signal ends the ranks at once. In a Slurm
# job, SIGUSR1 and SIGUSR2 also requeue the job; `#SBATCH --signal=B:USR1@600` sends it ten minutes before the time limit.
#
# Variables of all scripts (defaults in parentheses):
#   RUN            folder for checkpoints and curves, on a file system that all nodes can access (runs/NAME)
#   NNODES         number of nodes (the number of the script; in a Slurm job, the number of nodes of the job)
#   HEAD, PORT     for several nodes without Slurm: the host name of one of the nodes, the same on all nodes, and a free port on it
#                  (29500; the health check uses the next port)
#   DRY_RUN=1      only print the memory and the schedule of the job; needs no GPU, no data, and no other variable
#   PLAN=1         only search for faster layouts of the job on the cluster CLUSTER (h100; tools/plan.py --cluster list);
#                  the flag --plan has the same effect
#   SKIP_CHECK=1   skip the health check
#   MAX_RESTARTS   restarts in a row without a newer checkpoint (3)
#   MIN_NODES      minimum number of nodes with which a job of several nodes continues after a node is lost (all)
#   MIN_RANKS      minimum number of ranks with which a job of one node continues after a rank is lost (all)
#   LAUNCHER       supervisor or torchrun (supervisor)
#   PYTHON         the Python to use (python, or that of the project's .venv if python lacks a required package)

logging=(--log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10 --save-interval 1000)
missing=() invalid=() stops=0 requeue="" attempt=0

# need NAME DESCRIPTION: require that the variable NAME is set. `launch` reports all missing variables together.
need() {
    [[ -z ${!1-} ]] || return 0
    missing+=("$1 is not set: $2")
    printf -v "$1" '%s' "$1" # a dry run reads no file
}

# check_integer NAME MIN MAX: if the variable NAME is set, require an integer from MIN to MAX. `launch` reports all invalid values
# together. The pattern is strict, because in arithmetic bash would read a word as the name of a variable, and 010 as 8.
check_integer() {
    local value=${!1-}
    [[ -z $value || ($value =~ ^(0|[1-9][0-9]{0,8})$ && $value -ge $2 && $value -le $3) ]] ||
        invalid+=("$1 must be a whole number from $2 to $3, but is '$value'")
}

# launch NODES RANKS_PER_NODE NAME [FLAG...]: start the job. The flags are added to the flags of the lists, or override them.
launch() {
    nodes=${SLURM_JOB_NUM_NODES:-${NNODES:-$1}} per_node=$2 run=${RUN:-runs/$3}
    shift 3
    [[ ${1-} != -h && ${1-} != --help ]] || usage
    check_integer NNODES 1 1000000
    check_integer MAX_RESTARTS 0 1000000
    check_integer MIN_NODES 1 "$nodes"
    check_integer MIN_RANKS 1 "$per_node"
    [[ ${LAUNCHER:-supervisor} =~ ^(supervisor|torchrun)$ ]] ||
        invalid+=("LAUNCHER must be supervisor or torchrun, but is '$LAUNCHER'")
    [[ -z ${telling+set} ]] || invalid+=("the list telling of this script has a new name: logging")
    check_integer PORT 1 65534 # the health check uses the next port
    ((${#invalid[@]} == 0)) || fail 2 "$(printf '%s\n' "${invalid[@]}")"
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    source "$root/tools/find_python.sh"
    python=$(find_python "$root") || exit 2
    flags=("${model[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${data[@]}"
        "${logging[@]}" --tensorboard-dir "$run/tensorboard" --metrics-file "$run/metrics.jsonl"
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
    trap 'stops=$((stops + 1))' TERM INT HUP XCPU
    trap 'stops=$((stops + 1)) requeue=1' USR1 USR2
    train
}

say() { echo "${0##*/}: $1" >&2; }

fail() { # STATUS MESSAGE
    say "$2"
    exit "$1"
}

usage() { # print the comment at the top of the script
    awk 'NR > 1 && !/^#/ { exit } NR > 1 && !/^#SBATCH/ { sub(/^# ?/, ""); print }' "$0"
    exit 0
}

# Find the head node and the port. The batch script of a Slurm job starts commands on the nodes with srun. Without Slurm, this node
# is the only node, or one of several nodes on which the same script is started.
find_head() {
    hosts="" batch_job="" port=${PORT:-29500}
    if [[ -n ${SLURM_JOB_ID-} && -z ${SLURM_STEP_NUM_NODES-} ]]; then
        batch_job=$SLURM_JOB_ID
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        head=${hosts%%$'\n'*} port=${PORT:-$((20000 + batch_job % 10000 * 2))} # jobs that share a node need different ports
    elif ((nodes == 1)); then
        head=localhost
    else
        head=${HEAD:-}
        [[ -n $head ]] || fail 2 "HEAD is not set: the name or address of one of the $nodes nodes, the same on all of them"
    fi
}

# Run a command on every node of a Slurm job; without Slurm, on this node.
on_nodes() {
    if [[ -n $batch_job ]]; then
        # If the job may continue with fewer nodes, Slurm must not end the remaining nodes when one is lost.
        local on_loss=(--kill-on-bad-exit=1)
        ((${MIN_NODES:-$nodes} == nodes)) || on_loss=(--kill-on-bad-exit=0 --no-kill)
        interruptible srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none "${on_loss[@]}" "$@"
    else
        interruptible "$@"
    fi
}

# Run a command in the background and forward every signal to stop. bash handles no signal while a command runs in the foreground.
interruptible() {
    local child forwarded=$stops status
    "$@" &
    child=$!
    while true; do
        status=0
        wait "$child" || status=$?
        ((stops > forwarded)) || return "$status"
        forwarded=$stops
        if [[ -n $batch_job ]]; then
            scancel --signal=TERM "$batch_job" || true # all job steps, but not this script
        else
            kill -TERM "$child" 2> /dev/null || true
        fi
    done
}

# Run the dry run. It also determines the GPU memory that the job needs, for the health check.
rehearse() {
    local plan
    plan=$(mktemp)
    "${dry_run[@]}" --dry-run-json "$plan" || exit # a retry would fail in the same way
    device_bytes=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["device_bytes"])' "$plan")
    rm -f "$plan"
}

check() {
    [[ -z ${SKIP_CHECK-} ]] || return 0
    on_nodes "$python" "$root/tools/check_cluster.py" --nodes "$nodes" --ranks-per-node "$per_node" \
        --head "$head:$((port + 1))" --expect "${hosts//$'\n'/,}" --device-bytes "$device_bytes" -- "${flags[@]}"
}

newest() { # print the iteration of the newest checkpoint, or nothing if there is no checkpoint
    cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2> /dev/null || true
}

# Start the job again and again, until it is complete, a signal stops it, or an attempt saves no newer checkpoint.
train() {
    local before status
    while true; do
        attempt=$((attempt + 1)) before=$(newest) status=0
        check || status=$?
        ((stops == 0)) || break
        ((status == 0)) || fail "$status" "the health check found faults; SKIP_CHECK=1 starts without it"
        on_nodes bash "$root/examples/launch_node.sh" "$nodes" "$per_node" "$head:$port" "$run-$attempt" \
            "${program[@]}" || status=$?
        ((stops == 0 && status != 0 && status != 85)) || break # 85: a signal stopped the ranks
        ((status != 2 && status != 88)) || fail "$status" "a restart would fail in the same way: not restarted"
        [[ $(newest) != "$before" ]] ||
            fail "$status" "failed (exit status $status) before it saved a checkpoint: not restarted"
        say "failed (exit status $status) after checkpoint $(newest) was saved: restarting from that checkpoint"
    done
    if [[ -n $requeue && -n $batch_job ]]; then
        [[ $(newest) != "$before" ]] || fail 1 "the time limit was reached before a checkpoint was saved: the job is not requeued"
        say "the time limit is near: the job is requeued and will resume from checkpoint $(newest)"
        scontrol requeue "$batch_job"
    fi
    exit "$status"
}
