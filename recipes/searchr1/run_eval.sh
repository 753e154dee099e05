#!/usr/bin/env bash
# Evaluates a HuggingFace model directory as a search agent; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Evaluate a search agent with rlflow: exact match, F1, searches and turns per question, with 95% intervals.

  bash recipes/searchr1/run_eval.sh [CONFIG_NAME] --model DIR [--data FILE] [OPTIONS] [section.key=value ...]
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
  --pages FILE          whole pages for the tool access, JSON Lines: {"url": ..., "contents": ...}
  CONFIG_NAME           a configuration beside this script, config/CONFIG_NAME.yaml, as --config
  --config FILE         run configuration (default: that of the run DIR comes from, else config/demo.yaml: the embedded world)
  --questions N         only the first N questions
  --samples N           attempts per question (default 1)
  --temperature T       0 is greedy (default)
  --out DIR             where to write summary.json and trajectories.jsonl (default: a new folder runs/eval-NAME)
  --overwrite           replace an earlier evaluation in --out
  --allow-code          use all of the config.yaml beside the model, though others made it: the code, files and addresses in it
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
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
# shellcheck source=../searching.sh
. "$here/../searching.sh"
rlflow_evaluate "$here/config/demo.yaml" "$@"
