#!/usr/bin/env bash
# A tiny model learns to write functions that are run in a sandbox; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train on programs: functions of lists, each by a rule in words, tried on cases that the policy does not see.

  bash recipes/programs/run_train.sh [OPTIONS] [section.key=value ...]

Needs bubblewrap (Debian, Ubuntu: apt install bubblewrap). A tiny model first imitates a clumsy scripted player
(runs/programs-policy-SEED, once), then learns by GRPO: minutes on two cores, no GPU, account or download of a model.

Options
  --model DIR           another starting policy: a HuggingFace directory, or a name on the hub
  --dry-run             open all that the run needs, tell every problem, then exit
  --resume, --overwrite go on with the run that is there, or replace it
  -h, --help            this text
  section.key=value     override any configuration key, e.g. run.seed=1 run.name=second environment.depth=1

Look at it, program by program: rlflow view runs/programs --open

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
rlflow_setup run
cd "$RLFLOW_ROOT"
rlflow_world_policy programs python rlflow_environments.sandboxed.player:play --config "$here/config/made.yaml" --turns 1 \
    --episodes 600 --steps 400 rollout.max_response_tokens=96
rlflow_train_world "$here/config/made.yaml"
