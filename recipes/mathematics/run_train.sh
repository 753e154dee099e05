#!/usr/bin/env bash
# A tiny model learns to solve made problems of mathematics; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train on problems of mathematics whose answers are checked.

  bash recipes/mathematics/run_train.sh [OPTIONS] [section.key=value ...]

Without arguments a tiny model first imitates a clumsy scripted player of made problems, then learns by GRPO to solve them and
others that it never saw: a few minutes on two cores, no GPU, account or download of a model.

Options
  --specialities        instead, the nine data sets of reasoning_gym on which SAPO's nodes train (arXiv 2509.08721), one run
                        after another, by config/sapo.yaml; needs --model, and pip install reasoning-gym
  --model DIR           another starting policy: a HuggingFace directory, or a name on the hub
  --dry-run             open all that the run needs, tell every problem, then exit
  --resume, --overwrite go on with the run that is there, or replace it
  -h, --help            this text
  section.key=value     override any configuration key, e.g. run.seed=1, environment.train=train.jsonl (GSM8K's or DAPO's rows)

The run is runs/mathematics, the policy it starts from runs/mathematics-policy-SEED.

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
rlflow_read_world --specialities "$@"
rlflow_setup run
cd "$RLFLOW_ROOT"

if [ -n "${RLFLOW_GIVEN[--specialities]:-}" ]; then
    "$RLFLOW_PYTHON" -c 'import reasoning_gym' 2>/dev/null || rlflow_fail "the package 'reasoning-gym' is not installed: '$RLFLOW_PYTHON' -m pip install reasoning-gym"
    # Side by side in a swarm they would be nine calls of this one, each with a data set and a run of its own.
    while read -r name options; do
        case $name in '' | \#*) continue ;; esac
        rlflow_say "$name"
        "$RLFLOW_PYTHON" -m rlflow train --config "$here/config/sapo.yaml" ${model:+--model "$model"} ${arguments[@]+"${arguments[@]}"} \
            "run.name=sapo-$name" "environment.dataset=$name" "environment.options=$options" ${overrides[@]+"${overrides[@]}"} </dev/null
    done <"$here/specialities.txt"
    exit
fi

rlflow_world_policy mathematics mathematics rlflow_environments.mathematics.player:play --config "$here/config/made.yaml" \
    --turns 1 --steps 800
rlflow_train_world "$here/config/made.yaml"
