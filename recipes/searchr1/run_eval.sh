#!/usr/bin/env bash
# Evaluates a HuggingFace model directory as a search agent; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Evaluate a search agent with rlflow: exact match, F1, searches and turns per question, with 95% intervals.

  bash recipes/searchr1/run_eval.sh --model DIR [--data FILE] [OPTIONS] [section.key=value ...]
  bash recipes/searchr1/run_eval.sh --server URL [--data FILE] [OPTIONS] [section.key=value ...]

Options
  --model DIR           any HuggingFace directory, also the export/ of a run; or a run, whose newest checkpoint is taken; or a
                        Megatron checkpoint, which is converted into a directory beside it (<checkpoint>.hf) first; or a name on
                        the hub (Qwen/Qwen2.5-1.5B-Instruct), fetched once into HF_HOME
  --server URL          in place of --model: any OpenAI-compatible chat server, e.g. http://localhost:8000/v1. Text in, text out: limits
                        in tokens hold roughly, and scores may differ from those of the same model as --model
  --server-model NAME   the model's name there (default: the only one); its key stands in the variable OPENAI_API_KEY, or in that of
                        --api-key-variable NAME
  --hf DIR              config and tokenizer for a checkpoint (default: those of the model that its run started from)
  --data PATH           questions, JSON Lines: {"prompt": ..., "solutions": [...]}, a release of the field, or a folder of
                        evaluation sets, which are scored one by one (default: the configuration's validation set)
  --corpus FILE         the passages to search, JSON Lines: {"id": ..., "contents": "\"Title\"\nText"}
  --config FILE         run configuration (default: that of the run DIR comes from, else config/demo.yaml: the embedded world)
  --questions N         only the first N questions
  --samples N           attempts per question (default 1)
  --temperature T       0 is greedy (default)
  --out DIR             where to write summary.json and trajectories.jsonl (default: a new folder runs/eval-NAME)
  --overwrite           replace an earlier evaluation in --out
  --allow-code          run code that the config.yaml beside the model names, though others made it
  -h, --help            this text
  section.key=value     override any configuration key; every key: docs/configuration.md

A question that failed for infrastructure is reported apart, never scored 0. Every trajectory is written as a line of JSON.

Examples
  bash recipes/searchr1/run_eval.sh --model runs/searchr1-demo/export
  bash recipes/searchr1/run_eval.sh --model runs/searchr1-demo/checkpoints/step_000100
  bash recipes/searchr1/run_eval.sh --model runs/searchr1-demo/export environment.retriever.name=random   # does it read what it finds?
  bash recipes/searchr1/run_eval.sh --model Qwen/Qwen2.5-3B-Instruct --data val.jsonl --corpus corpus.jsonl \
      --config recipes/searchr1/config/qwen2.5_3b.yaml
  bash recipes/searchr1/run_eval.sh --server http://localhost:8000/v1 --data val.jsonl --corpus corpus.jsonl
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
[ $# -gt 0 ] || { usage; exit 2; }
for argument in "$@"; do
    case $argument in -h | --help) usage; exit 0 ;; esac
done
# shellcheck source=../common.sh
. "$here/../common.sh"

config='' model='' arguments=() overrides=()
while [ $# -gt 0 ]; do
    case $1 in
    --config | --model | --server | --server-model | --api-key-variable | --hf | --data | --corpus | --out | --questions | --temperature | --samples)
        [ $# -ge 2 ] || rlflow_fail "$1 needs a value; see --help"
        name=$1 value=$2
        shift 2
        set -- "$name=$value" "$@"
        ;;
    --config=*) config=$(rlflow_path "${1#*=}"); shift ;;
    --out=*) arguments+=(--out "$(realpath -m "${1#*=}")"); shift ;;
    --model=*) model=$(rlflow_path "${1#*=}"); shift ;;
    --hf=*) arguments+=(--hf "$(rlflow_path "${1#*=}")"); shift ;;
    --data=* | --corpus=*) arguments+=("${1%%=*}" "$(rlflow_path "${1#*=}")"); shift ;;
    --questions=* | --temperature=* | --samples=* | --allow-code | --overwrite | --env=* | \
        --server=* | --server-model=* | --api-key-variable=*) arguments+=("$1"); shift ;;
    -*) rlflow_unknown "$1" --model --server --server-model --api-key-variable --hf --data --corpus --config --questions --samples --temperature --out --overwrite --allow-code --help ;;
    *=*) overrides+=("$1"); shift ;;
    *) rlflow_fail "unexpected argument '$1'; overrides are section.key=value, see --help" ;;
    esac
done

rlflow_setup run
cd "$RLFLOW_ROOT" # the paths of a configuration file are relative to the repository
# `rlflow eval` finds the configuration of the run that the model is, is the export of, or is a checkpoint of.
[ -n "$config" ] || [ -f "$model/config.yaml" ] || [ -f "$model/../config.yaml" ] || [ -f "$model/../../config.yaml" ] ||
    [ -f "$model/../../../config.yaml" ] || config=$here/config/demo.yaml
[ -z "$config" ] || arguments+=(--config "$config")
[ -z "$model" ] || arguments+=(--model "$model")
exec "$RLFLOW_PYTHON" -m rlflow eval \
    ${arguments[@]+"${arguments[@]}"} ${overrides[@]+"${overrides[@]}"} # options first: argparse wants the overrides together
