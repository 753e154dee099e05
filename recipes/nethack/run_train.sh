#!/usr/bin/env bash
# Trains a policy that digs down in NetHack; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train a policy that plays NetHack.

  bash recipes/nethack/run_train.sh [--oni] [section.key=value ...]

The first start creates .venv. A tiny model imitates a scripted player (runs/nethack-policy-SEED, once), then is trained by GRPO to
dig down as an archeologist: to leave the stairs, to apply the pick-axe, to answer what the game asks. The reward is levels. No
GPU or account is needed.

Options
  --oni                 with intrinsic rewards (arXiv 2410.23022) by a labeller of the game's messages; without --labeller it is a
                        program of rules on this machine, a tenth of whose labels are wrong
  --labeller URL        an OpenAI-compatible server as the labeller, with its environment.endpoint.model=NAME
  -h, --help            this text
  section.key=value     override any configuration key (docs/configuration.md), e.g. run.seed=1 run.name=second

Look at it: rlflow view runs/nethack --open. With and without: rlflow compare runs/nethack runs/nethack-oni

Environment variables
  RLFLOW_VENV, RLFLOW_BASE_PYTHON, OMP_NUM_THREADS    as in recipes/searchr1/run_train.sh
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
config=dig labeller='' seed=0 overrides=()
while [ $# -gt 0 ]; do
    case $1 in
    --oni) config=oni ;;
    --labeller) [ $# -ge 2 ] || rlflow_fail "--labeller needs a value; see --help"; config=oni labeller=$2; shift ;;
    --labeller=*) config=oni labeller=${1#*=} ;;
    -*) rlflow_unknown "$1" --oni --labeller --help ;;
    run.seed=*) seed=${1#*=}; overrides+=("$1") ;;
    *=*) overrides+=("$1") ;;
    *) rlflow_fail "unexpected argument '$1'; see --help" ;;
    esac
    shift
done
rlflow_setup nethack
cd "$RLFLOW_ROOT"
policy=runs/nethack-policy-$seed
if [ ! -e "$policy/config.json" ]; then
    "$RLFLOW_PYTHON" -m rlflow env policy nethack rlflow_environments.nethack.player:play --config "$here/config/dig.yaml" \
        --out "$policy" --turns 7 --episodes 300 --steps 100 --seed "$seed"
fi
if [ "$config" = oni ]; then
    if [ -z "$labeller" ]; then
        port=$("$RLFLOW_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
        labeller=http://127.0.0.1:$port/v1
        "$RLFLOW_PYTHON" "$here/labeller.py" "$port" 0.1 &
        trap 'kill $! 2>/dev/null || true' EXIT
    fi
    overrides=("environment.endpoint.url=$labeller" ${overrides[@]+"${overrides[@]}"})
fi
"$RLFLOW_PYTHON" -m rlflow train --config "$here/config/$config.yaml" --overwrite "model.path=$policy" ${overrides[@]+"${overrides[@]}"}
