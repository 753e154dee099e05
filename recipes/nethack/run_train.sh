#!/usr/bin/env bash
# Trains a policy that digs down in NetHack; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train a policy that plays NetHack.

  bash recipes/nethack/run_train.sh [--oni] [OPTIONS] [section.key=value ...]

The first start creates .venv. A tiny model imitates a scripted player (runs/nethack-policy-SEED, once), then is trained by GRPO to
dig down as an archeologist: to leave the stairs, to apply the pick-axe, to answer what the game asks. The reward is levels. No
GPU or account is needed.

Options
  --oni                 with intrinsic rewards (arXiv 2410.23022) by a labeller of the game's messages; without --labeller it is a
                        program of rules on this machine, a tenth of whose labels are wrong
  --labeller URL        an OpenAI-compatible server as the labeller, with its environment.endpoint.model=NAME
  --model DIR           another starting policy: a HuggingFace directory, or a name on the hub
  --dry-run             open all that the run needs, tell every problem, then exit
  --resume, --overwrite go on with the run that is there, or replace it
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
# shellcheck source=../worlds.sh
. "$here/../worlds.sh"
rlflow_help "$@"
rlflow_read_world "--oni --labeller=" "$@"
rlflow_setup nethack
cd "$RLFLOW_ROOT"
rlflow_world_policy nethack nethack rlflow_environments.nethack.player:play --config "$here/config/dig.yaml" \
    --turns 7 --episodes 300 --steps 100
config=dig labeller=${RLFLOW_GIVEN[--labeller]:-}
if [ -n "${RLFLOW_GIVEN[--oni]:-}$labeller" ]; then
    config=oni
    # Of a dry run: an address where nobody is asked
    [ -n "$labeller" ] || [ -z "${RLFLOW_GIVEN[--dry-run]:-}" ] || labeller=http://127.0.0.1:9/v1
    [ -n "$labeller" ] || read -r labeller < <(exec "$RLFLOW_PYTHON" "$here/labeller.py" 0.1)
    overrides=("environment.endpoint.url=$labeller" ${overrides[@]+"${overrides[@]}"})
fi
rlflow_train_world "$here/config/$config.yaml"
