#!/usr/bin/env bash
# Trains a policy that works on web pages in Chromium; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train a policy that acts on pages of MiniWoB++ in a real browser.

  bash recipes/browser/run_train.sh [OPTIONS] [section.key=value ...]

Needs Chromium (Debian, Ubuntu: apt install chromium). The first start creates .venv. A tiny model imitates a scripted player
(runs/browser-policy-SEED, once), then learns by GRPO to click buttons, two in the order that is asked for, and to enter a text and
submit it. No GPU, account or network beyond the set-up is needed; it takes about ten minutes on two cores.

Options
  --model DIR           another starting policy: a HuggingFace directory, or a name on the hub
  --dry-run             open all that the run needs, tell every problem, then exit
  --resume, --overwrite go on with the run that is there, or replace it
  -h, --help            this text
  section.key=value     override any configuration key (docs/configuration.md), e.g. run.seed=1 run.name=second

Look at it, with a picture of every page: rlflow view runs/browser --open

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
rlflow_read_world "" "$@"
rlflow_setup browser
cd "$RLFLOW_ROOT"
rlflow_world_policy browser miniwob rlflow_environments.browser.player:play --turns 3 --episodes 400 \
    environment.pictures=false environment.tasks_per_split=510
rlflow_train_world "$here/config/demo.yaml"
