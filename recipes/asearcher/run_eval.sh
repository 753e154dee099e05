#!/usr/bin/env bash
# Evaluates a search agent that opens pages; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Evaluate a search agent with searches and pages: exact match, F1, searches, pages and turns per question, with 95% intervals.

  bash recipes/asearcher/run_eval.sh --model DIR [--data PATH] [OPTIONS] [section.key=value ...]

Options are those of recipes/searchr1/run_eval.sh (--help there), with
  --data PATH           questions, or a folder of evaluation sets, scored one by one (default: those of the configuration)
  --corpus FILE         the passages to search
  --pages FILE          the pages that can be opened
  --samples N           attempts per question (default here: 4, as avg@4)
  --temperature T       default here: 0.6
  --config FILE         default: that of the run DIR comes from, else config/demo.yaml

Examples
  bash recipes/asearcher/run_eval.sh --model runs/asearcher-demo-delta/export
  bash recipes/asearcher/run_eval.sh --model Qwen/Qwen2.5-7B-Instruct --config recipes/asearcher/config/m2po_full.yaml \
      --data data/asearcher --corpus data/asearcher/wiki_corpus.jsonl --pages data/asearcher/wiki_webpages.jsonl
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
[ $# -gt 0 ] || { usage; exit 2; }
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
RLFLOW_PROFILE=cluster
# shellcheck source=../searching.sh
. "$here/../searching.sh"
rlflow_evaluate "$here/config/demo.yaml" --samples=4 --temperature=0.6 "$@" # what is given later wins
