#!/usr/bin/env bash
# Trains on a Ray cluster of its own, whose processes may die; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train on a Ray cluster apart from the run: trainer ranks and rollout workers are its processes, and may be on other machines.

  bash recipes/asearcher/run_processes.sh [OPTIONS of run_train.sh] [section.key=value ...]

Starts
  cluster    ray start --head      on this machine (loopback only)
  train      rlflow train --config ... cluster.address=ADDRESS
and ends both when the run has ended or Ctrl-C comes. Each is started again when it dies, whoever killed it. A lost rollout worker
is replaced and its attempts are issued again; after the death of a trainer rank or of `rlflow train` the run goes on from its last
checkpoint. Their process ids are in RUN.processes/NAME.pid, what they say in RUN.processes/NAME.log.

Options are those of run_train.sh (--help there); without data it is the demo. On several machines start Ray by hand:
docs/clusters.md.

  --workers N           rollout workers (default: the recipe's)
  --ranks N             trainer ranks (default: the recipe's, at least 1)
  -h, --help            this text

Environment variables
  RLFLOW_CLUSTER        address of a Ray cluster that runs already, which is used and left running
  RLFLOW_RESTARTS       how often a process may die before this gives up (default 20)
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
# shellcheck source=../searching.sh
. "$here/../searching.sh"
# shellcheck source=options.sh
. "$here/options.sh"

given=() workers='' ranks=''
while [ $# -gt 0 ]; do
    case $1 in
    --workers | --ranks) [ $# -ge 2 ] || rlflow_fail "$1 needs a value; see --help"; set -- "$1=$2" "${@:3}" ;;
    --workers=*) workers=${1#*=}; shift ;;
    --ranks=*) ranks=${1#*=}; shift ;;
    *) given+=("$1"); shift ;;
    esac
done
rlflow_read_train ${given[@]+"${given[@]}"}
asearcher_config
rlflow_setup cluster
cd "$RLFLOW_ROOT"
[ -z "$workers" ] || overrides+=("cluster.rollout_workers=$workers")
[ -z "$ranks" ] || overrides+=("cluster.ranks=$ranks")

# What the configuration says of the run: its directory, workers, ranks, threads of each.
read -r directory workers ranks threads < <("$RLFLOW_PYTHON" -c '
import sys
from rlflow.config.schema import load_config
from rlflow.run.directory import run_path
config = load_config(sys.argv[1], sys.argv[2:])
cluster = config.cluster
print(run_path(config.run).absolute(), cluster.rollout_workers or 1, cluster.ranks or 1, cluster.threads_per_rank)
' "$config" ${overrides[@]+"${overrides[@]}"}) || rlflow_fail "the configuration could not be read"
places=$directory.processes
first='' kept=()
for argument in ${arguments[@]+"${arguments[@]}"}; do
    case $argument in
    --dry-run) rlflow_train ;;
    --resume | --overwrite) first=$argument ;;
    *) kept+=("$argument") ;;
    esac
done
[ -n "$first" ] || [ ! -e "$directory/config.yaml" ] ||
    rlflow_fail "$directory has a run already: --resume goes on with it, --overwrite throws it away"
mkdir -p "$places"
rm -f "$places"/*.log "$places"/*.pid

keepers=()
# Runs a command under a name, in the background, again and again until it ends well. first, later: a word that is added at the
# first start, and at others.
keep() {
    local name=$1 first=$2 later=$3
    shift 3
    (
        child='' deaths=0 quick=0 added=$first
        trap '[ -z "$child" ] || kill "$child" 2>/dev/null || true; wait "$child" 2>/dev/null || true; exit 0' TERM INT
        while :; do
            began=$SECONDS status=0
            setsid "$@" ${added:+"$added"} >>"$places/$name.log" 2>&1 </dev/null &
            child=$!
            echo "$child" >"$places/$name.pid"
            { wait "$child"; } 2>/dev/null || status=$? # bash would print the whole command that was killed
            [ "$status" -ne 0 ] || exit 0
            deaths=$((deaths + 1)) quick=$((SECONDS - began < 20 ? quick + 1 : 0)) added=$later
            if [ "$deaths" -gt "${RLFLOW_RESTARTS:-20}" ] || [ "$quick" -ge 3 ]; then
                rlflow_say "$name ended $deaths times, now with status $status ($(tail -n 1 "$places/$name.log")): given up"
                exit "$status"
            fi
            rlflow_say "$name ended with status $status ($(tail -n 1 "$places/$name.log")): started again"
            sleep 1
        done
    ) &
    keepers+=($!)
}

end_all() {
    trap - EXIT INT TERM
    local place
    for place in "${keepers[@]-}"; do [ -z "$place" ] || kill "$place" 2>/dev/null || true; done
    for place in "${keepers[@]-}"; do [ -z "$place" ] || wait "$place" 2>/dev/null || true; done
    rm -f "$places"/*.pid
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

address=${RLFLOW_CLUSTER:-}
if [ -z "$address" ]; then
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 # else Ray's servers listen on all interfaces, see rlflow/cluster/session.py
    read -r port clients < <("$RLFLOW_PYTHON" -c '
import socket
first, second = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
print(first.getsockname()[1], second.getsockname()[1])')
    address=127.0.0.1:$port
    keep cluster '' '' "$RLFLOW_PYTHON" -c 'from ray.scripts.scripts import main; main()' start --head --block "--port=$port" \
        --node-ip-address=127.0.0.1 "--ray-client-server-port=$clients" --include-dashboard=false --disable-usage-stats \
        "--num-cpus=$(((workers + ranks) * threads + 1))"
    for _ in $(seq 120); do
        grep -q "Ray runtime started" "$places/cluster.log" 2>/dev/null && break
        sleep 0.5
    done
    grep -q "Ray runtime started" "$places/cluster.log" || rlflow_fail "Ray did not start within 60 s; see $places/cluster.log"
fi
rlflow_say "cluster $address, processes in $places"
keep train "$first" --resume "$RLFLOW_PYTHON" -m rlflow train --config "$config" ${kept[@]+"${kept[@]}"} \
    ${overrides[@]+"${overrides[@]}"} "cluster.address=$address" "cluster.rollout_workers=$workers" "cluster.ranks=$ranks"
train=${keepers[-1]}
tail -n +1 -F --pid="$train" "$places/train.log" 2>/dev/null & # what the run says
keepers+=($!)
status=0
wait "$train" || status=$?
sleep 1
exit "$status"
