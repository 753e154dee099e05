#!/usr/bin/env bash
# Trains a policy that works on web pages in Chromium; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train a policy that acts on pages of MiniWoB++ in a real browser.

  bash recipes/browser/run_train.sh [section.key=value ...]

Needs Chromium (Debian, Ubuntu: apt install chromium). The first start creates .venv. A tiny model imitates a scripted player
(runs/browser-policy, once), then learns by GRPO to click buttons, two in the order that is asked for, and to enter a text and
submit it. No GPU, account or network beyond the set-up is needed; it takes about ten minutes on two cores.

Options
  -h, --help            this text
  section.key=value     override any configuration key (docs/configuration.md), e.g. run.seed=1 run.name=second

Look at it, with a picture of every page: rlflow view runs/browser --open

Environment variables
  RLFLOW_VENV, RLFLOW_BASE_PYTHON, OMP_NUM_THREADS    as in recipes/searchr1/run_train.sh
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
overrides=()
for argument in "$@"; do
    case $argument in
    -h | --help) usage; exit 0 ;;
    *=*) overrides+=("$argument") ;;
    *) echo "[rlflow] error: unexpected argument '$argument'; see --help" >&2; exit 2 ;;
    esac
done
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_setup browser
cd "$RLFLOW_ROOT"
if [ ! -e runs/browser-policy/config.json ]; then
    "$RLFLOW_PYTHON" -m rlflow env policy miniwob rlflow_environments.browser.player:play --out runs/browser-policy \
        --turns 3 --episodes 400 environment.pictures=false environment.tasks_per_split=510
fi
exec "$RLFLOW_PYTHON" -m rlflow train --config "$here/config/demo.yaml" --overwrite ${overrides[@]+"${overrides[@]}"}
