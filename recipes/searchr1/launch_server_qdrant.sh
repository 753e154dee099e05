#!/usr/bin/env bash
# Serves a Qdrant collection to search agents; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Serve a Qdrant collection to search agents over HTTP, in the foreground, as RLinf's launch_local_server.sh for Qdrant does. Qdrant
itself must be running; a collection that RLinf's builder made is served as it is.

  bash recipes/searchr1/launch_server_qdrant.sh [OPTIONS]

Options (more: rlflow search serve --help)
  --qdrant_url URL                    default http://localhost:6333
  --qdrant_collection_name NAME       default wiki_collection_m32_cef512, the prebuilt one
  --qdrant_search_param JSON          default {"hnsw_ef": 256}
  --qdrant_search_quant_param JSON    e.g. {"rescore": true, "oversampling": 2}
  --retriever_name NAME               the encoder's family (default: what the name of the model says)
  --retriever_model PATH              the encoder (default intfloat/e5-base-v2)
  --pages_path FILE                   whole pages for POST /access
  --topk N                            default 3
  --host ADDRESS, --port PORT         default 127.0.0.1 and 8000
  --save-address-to DIR               write Host{ip}_IP{port}.txt there while the server can answer

Environment variables, where an option is not given
  QDRANT_URL, QDRANT_COLLECTION_NAME, RETRIEVER_PATH, TOPK, PORT, RAG_SERVER_ADDR_DIR

Example
  QDRANT_URL=http://10.0.0.3:6333 bash recipes/searchr1/launch_server_qdrant.sh --host 0.0.0.0
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"

# argparse takes the last of an option's values: what stands in "$@" wins.
defaults=(
    --qdrant_url "${QDRANT_URL:-http://localhost:6333}"
    --qdrant_collection_name "${QDRANT_COLLECTION_NAME:-wiki_collection_m32_cef512}"
    --qdrant_search_param '{"hnsw_ef": 256}'
    --topk "${TOPK:-3}"
    --port "${PORT:-8000}"
)
[ -z "${RETRIEVER_PATH:-}" ] || defaults+=(--retriever_model "$RETRIEVER_PATH")
[ -z "${RAG_SERVER_ADDR_DIR:-}" ] || defaults+=(--save-address-to "$RAG_SERVER_ADDR_DIR")

rlflow_setup run
exec "$RLFLOW_PYTHON" -m rlflow_environments.retrieval serve "${defaults[@]}" "$@"
