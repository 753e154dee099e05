#!/usr/bin/env bash
# Builds a Qdrant collection from a corpus for launch_server_qdrant.sh; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Build a Qdrant collection from a corpus, with the flags of RLinf's build_index.py: one unnamed vector, cosine, point id = row of
the corpus, payload = the whole record, HNSW with m 32 and ef_construct 512. It shows how far it is, leaves points alone that are
there, and so goes on where it was stopped when it is given again. Nothing is dropped: another corpus or encoder is an error.

  bash recipes/searchr1/build_qdrant.sh --corpus_path FILE [OPTIONS]

Options (more: rlflow search build --help, whose options are taken too)
  --corpus_path FILE              the passages: {"id", "contents"} or {"title", "text"} per line
  --qdrant_url URL                default http://localhost:6333, or QDRANT_URL
  --qdrant_collection_name NAME   default wiki_collection_m32_cef512, or QDRANT_COLLECTION_NAME
  --retriever_name NAME           the encoder's family (default: what the name of the model says)
  --retriever_model PATH          the encoder (default intfloat/e5-base-v2, or RETRIEVER_PATH)
  --device NAME                   cuda (default where there is a GPU) or cpu

Serve it
  bash recipes/searchr1/launch_server_qdrant.sh --qdrant_url URL --qdrant_collection_name NAME
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"
corpus='' model=${RETRIEVER_PATH:-intfloat/e5-base-v2}
url=${QDRANT_URL:-http://localhost:6333} collection=${QDRANT_COLLECTION_NAME:-wiki_collection_m32_cef512}
device=cpu; rlflow_has_gpu && device=cuda
options=()
while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    [ $# -ge 2 ] || rlflow_fail "$1: expected a value; see --help"
    case $1 in
    --corpus_path) corpus=$(rlflow_path "$2") ;;
    --qdrant_url) url=$2 ;;
    --qdrant_collection_name) collection=$2 ;;
    --retriever_name) options+=(--family "${2,,}") ;;
    --retriever_model) model=$(rlflow_path "$2") ;;
    --device) device=$2 ;;
    *) options+=("$1" "$2") ;;
    esac
    shift 2
done
[ -n "$corpus" ] || rlflow_fail "expected --corpus_path FILE; see --help"

options+=(--url "$url" --collection "$collection")
[ "$model" = hashed ] || options+=(--device "$device")
rlflow_setup run
exec "$RLFLOW_PYTHON" -m rlflow_environments.retrieval build --corpus "$corpus" --index qdrant --encoder "$model" "${options[@]}"
