#!/usr/bin/env bash
# Two different tiny models train together on this machine; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train two peers that share their experience (arXiv 2509.08721).

  bash recipes/swarm/run_train.sh [--alone] [section.key=value ...]

A Qwen2 and a Llama model with different vocabularies learn the alphabet, each from one half of it; both are evaluated on all of
it. They exchange what they said as text, through a directory; each scores what comes with its own environment. It takes about
two minutes on two cores; the runs are runs/swarm/first and runs/swarm/second.

Options
  --alone               without the exchange, to compare: neither gets beyond its half
  -h, --help            this text
  section.key=value     override any configuration key of both, e.g. run.steps=20

Environment variables
  RLFLOW_SWARM          where runs, models and shared files go (default: runs/swarm of the repository)
  RLFLOW_VENV, RLFLOW_BASE_PYTHON, OMP_NUM_THREADS    as in recipes/searchr1/run_train.sh
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
alone='' overrides=()
for argument in "$@"; do
    case $argument in
    -h | --help) usage; exit 0 ;;
    --alone) alone=1 ;;
    *=*) overrides+=("$argument") ;;
    *) echo "[rlflow] error: unexpected argument '$argument'; see --help" >&2; exit 2 ;;
    esac
done
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_setup run
export OMP_NUM_THREADS=1 # the two runs are side by side
cd "$RLFLOW_ROOT"
place=${RLFLOW_SWARM:-runs/swarm}
rm -rf "$place/shared" "$place/models"
"$RLFLOW_PYTHON" "$here/alphabet.py" "$place/models"

shared="algorithm.filters=[{name: swarm, tasks: any, external: 6, transport: {name: directory, path: '$place/shared'}}]"
[ -z "$alone" ] || shared='algorithm.filters=[]'
peers=()
for peer in first second; do
    "$RLFLOW_PYTHON" -m rlflow train --config "$here/config/swarm.yaml" --overwrite "run.directory=$place/{name}" "run.name=$peer" \
        "model.path=$place/models/$peer" "environment.half=$peer" "$shared" ${overrides[@]+"${overrides[@]}"} &
    peers+=($!)
done
trap 'kill "${peers[@]}" 2>/dev/null || true' EXIT
for peer in "${peers[@]}"; do wait "$peer"; done
