#!/usr/bin/env bash
# Trains a search agent that opens pages, asynchronously, with M2PO. Without data: the demo; `--help` explains the rest.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train a long-horizon search agent (ASearcher's environment, AstraFlow's recipe) with rlflow: episodes of up to 32 responses that search
and open pages run ahead of training, which corrects for what is stale by M2PO.

  bash recipes/asearcher/run_train.sh [CONFIG_NAME] [--recipe NAME] [--short] [OPTIONS] [section.key=value ...]

Without data it runs the demo on two CPU cores, as with --short: a tiny model learns to look things up on the pages of a fictional
encyclopedia. No GPU, account or download of a model is needed.

Options
  --recipe NAME         m2po_delta (default): weights travel as the bits that changed, all of them every tenth time; or m2po_full: all of
                        them every time. Nothing else differs
  --short               the recipe at the size of two CPU cores, also where data files are given
  CONFIG_NAME           a configuration beside this script: config/CONFIG_NAME.yaml
  --config FILE         another run configuration (YAML); every key: docs/configuration.md
  --model DIR           starting policy: a HuggingFace directory, or its name on the hub
  --preset NAME         a named algorithm in place of M2PO (rlflow algorithm list --kind preset)
  --train-data FILE     training questions: ASearcher-Base-35k.jsonl, or any file that docs/search_data.md names
  --val-data PATH       evaluation sets: the folder of ASearcher-test-data, of which the recipe takes four, or a file
  --corpus FILE         the passages to search: ASearcher's wiki_corpus.jsonl, or your own
  --pages FILE          the pages that can be opened: wiki_webpages.jsonl, or your own, {"url": ..., "contents": ...}
  --resume              continue the run in run.directory from its newest checkpoint
  --overwrite           throw away what an earlier run left in run.directory
  --dry-run             open all that the run needs, print configuration, batch plan, memory, time and every problem, then exit
  -h, --help            this text
  section.key=value     override any configuration key, e.g. rollout.asynchronous.max_staleness=2

Examples
  bash recipes/asearcher/run_train.sh --short --recipe m2po_delta
  bash recipes/asearcher/run_train.sh --resume                      # after Ctrl-C or a crash
  python -m recipes.searchr1.download asearcher-wiki asearcher-train asearcher-test --save_path data/asearcher
  bash recipes/asearcher/run_train.sh --recipe m2po_full --train-data data/asearcher/ASearcher-Base-35k.jsonl \
      --val-data data/asearcher --corpus data/asearcher/wiki_corpus.jsonl --pages data/asearcher/wiki_webpages.jsonl --dry-run

Runs are written to runs/asearcher-NAME/, those of the demo to runs/asearcher-demo-NAME/. Look at one with `rlflow show RUN`.
The three processes apart: recipes/asearcher/run_processes.sh. Environment variables are those of recipes/searchr1/run_train.sh.
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
# shellcheck source=../searching.sh
. "$here/../searching.sh"
# shellcheck source=options.sh
. "$here/options.sh"

rlflow_read_train "$@"
asearcher_config
rlflow_train
