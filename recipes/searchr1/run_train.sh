#!/usr/bin/env bash
# Trains a search agent. Without arguments: the demo on the embedded world; `--help` explains the rest.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train a search agent (Search-R1) with rlflow.

  bash recipes/searchr1/run_train.sh [CONFIG_NAME] [--short] [OPTIONS] [section.key=value ...]

Without arguments it runs the demo: a tiny model learns by GRPO to answer questions about a fictional encyclopedia by
searching it. No GPU, account or download of a model is needed. The first start creates .venv and installs what the job
needs (a few minutes); an active environment that already has rlflow is used as it is.

Options
  --short               the demo in three minutes (config/short.yaml)
  --model-kind KIND     the demo's starting policy: dense, or moe: the same with experts, 1.3 million parameters, made once as
                        runs/starting-policy-moe
  CONFIG_NAME           a configuration beside this script, e.g. qwen2.5_3b: config/CONFIG_NAME.yaml. `agent` is the short demo played
                        by an agent on OpenAI's client (agent.py), through the endpoint; its data are made first
  --config FILE         another run configuration (YAML); every key: docs/configuration.md. One of RLinf or AstraFlow is translated,
                        into --out FILE (default runs/NAME.yaml), and what became of each of its keys is said
  --model DIR           starting policy: a HuggingFace directory (config.json, *.safetensors, tokenizer), or its name on the hub, e.g.
                        Qwen/Qwen2.5-1.5B-Instruct: fetched once into HF_HOME; HF_ENDPOINT (a mirror) and HF_HUB_OFFLINE count
  --preset NAME         a named algorithm in place of the configuration's (rlflow algorithm list --kind preset)
  --train-data FILE     training questions, JSON Lines: {"prompt": ..., "solutions": [...]}
  --val-data FILE       validation questions, same format
  --corpus FILE         the passages to search, JSON Lines: {"id": ..., "contents": "\"Title\"\nText"}
  --pages FILE          whole pages for the tool access, JSON Lines: {"url": ..., "contents": ...}
  --resume              continue the run in run.directory from its newest checkpoint
  --overwrite           throw away what an earlier run left in run.directory
  --dry-run             open all that the run needs (model, tokenizer, data, index, packages, addresses, disk), print configuration,
                        batch plan, memory, time and every problem, then exit; nothing is started or written
  -h, --help            this text
  section.key=value     override any configuration key, e.g. run.name=try rollout.samples_per_prompt=4 trainer.lr=2e-6

Which configuration is used
  CONFIG_NAME or --config FILE if given; else config/short.yaml with --short; else config/qwen2.5_3b.yaml if data files are given;
  else config/demo.yaml. Relative paths in options are relative to the current directory, those in configuration files and overrides
  to the repository; runs are written to runs/<run.name>/ of the repository unless run.directory says otherwise.

Examples
  bash recipes/searchr1/run_train.sh
  bash recipes/searchr1/run_train.sh --short run.seed=3
  bash recipes/searchr1/run_train.sh --resume                      # after Ctrl-C or a crash
  bash recipes/searchr1/run_train.sh run.name=pairs cluster.ranks=4 trainer.tensor_parallel=2 trainer.pipeline_parallel=2
  bash recipes/searchr1/run_train.sh --model Qwen/Qwen2.5-3B-Instruct --train-data train.jsonl --val-data val.jsonl \
      --corpus corpus.jsonl --dry-run

A run directory holds config.yaml, metrics.jsonl, progress.png, checkpoints/, trajectories/, evaluations/ and export/ (a
HuggingFace directory). Look at it with `rlflow show runs/<run.name>`, evaluate it with recipes/searchr1/run_eval.sh.

Environment variables
  RLFLOW_VENV           where the virtual environment lies (default: .venv in the repository)
  RLFLOW_BASE_PYTHON    the Python to create it with (default: the first one >= 3.11)
  OMP_NUM_THREADS       threads per process (default: the cores this process may use, at most 16)
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
# shellcheck source=../searching.sh
. "$here/../searching.sh"

RLFLOW_KINDS="dense moe"
rlflow_read_train "$@"
if [ -z "$config" ]; then
    config=$here/config/demo.yaml
    [ -z "$own_data" ] || config=$here/config/qwen2.5_3b.yaml
    [ -z "$short" ] || config=$here/config/short.yaml
fi
case " ${arguments[*]-} " in *' --dry-run '*) dry=1 ;; *) dry= ;; esac
scratch=
if [ -n "$dry" ]; then # what a start would make first is made aside, and thrown away
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
fi
if [ "$kind" = moe ]; then
    rlflow_setup run
    start=$RLFLOW_ROOT/runs/starting-policy-moe
    [ -z "$dry" ] || [ -f "$start/config.json" ] || start=$scratch/starting-policy-moe
    [ -f "$start/config.json" ] || (cd "$RLFLOW_ROOT" && "$RLFLOW_PYTHON" -m recipes.searchr1.experts "$start")
    overrides=("model.path=$start" run.name=searchr1-moe ${overrides[@]+"${overrides[@]}"})
fi
if [ "$config" = "$here/config/agent.yaml" ]; then
    rlflow_setup run
    "$RLFLOW_PYTHON" -c 'import openai' 2>/dev/null || rlflow_fail "the package 'openai' is not installed: '$RLFLOW_PYTHON' -m pip install openai"
    world=$(cd "$RLFLOW_ROOT" && "$RLFLOW_PYTHON" -c 'from rlflow_environments.search.sources import world_files
import sys
from pathlib import Path
elsewhere = Path(sys.argv[1], "world") if sys.argv[1] else None
print(world_files({"directory": "data/searchr1", "seed": 7}, elsewhere)["corpus"].resolve().parent)' "$scratch")
    export CORPUS=$world/corpus.jsonl  # what the agent searches
    overrides=("environment.train=$world/train.jsonl" "environment.val=$world/val.jsonl" ${overrides[@]+"${overrides[@]}"})
fi
if [ -n "$dry" ]; then
    status=0
    (rlflow_train) || status=$?
    exit "$status"
fi
rlflow_train
