#!/usr/bin/env bash
# Serves a FAISS index (or any other of rlflow) to search agents; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Serve passages to search agents over HTTP, in the foreground: POST /retrieve and POST /access, as the servers of Search-R1, RLinf,
ASearcher and AstraFlow do, at http://127.0.0.1:8000 unless told otherwise.

  bash recipes/searchr1/launch_server.sh [OPTIONS]                  as RLinf's and Search-R1's launch scripts
  bash recipes/searchr1/launch_server.sh GPU_IDS [OPTIONS]          as AstraFlow's launch_rag_server.sh, e.g. 0,1
  bash recipes/searchr1/launch_server.sh PORT ADDR_DIR [OPTIONS]    as ASearcher's launch_local_server.sh

Options (more: rlflow search serve --help)
  --index_path PATH        a faiss file as Search-R1 builds it (e5_Flat.index), or an index folder of `rlflow search build`
  --corpus_path FILE       the passages, in the order of the index; an index folder remembers its own
  --pages_path FILE        whole pages for POST /access
  --retriever_name NAME    the encoder's family: e5 (default), bge, ...; or bm25, which needs no index
  --retriever_model PATH   the encoder (default intfloat/e5-base-v2)
  --topk N                 passages where a request does not say (default 3)
  --faiss_gpu              the index on all visible GPUs, in float16
  --host ADDRESS           default 127.0.0.1; 0.0.0.0 for clients on other machines
  --port PORT              default 8000, in AstraFlow's form 7000; 0 picks a free one
  --save-address-to DIR    write Host{ip}_IP{port}.txt there while the server can answer

Environment variables, where an option is not given
  PORT                     as --port (default 7000 with GPU_IDS alone, else 8000)
  RETRIEVER_NAME           as --retriever_name
  RETRIEVER_PATH           as --retriever_model
  TOPK                     as --topk
  USE_FAISS_GPU            1: as --faiss_gpu (default 1 with GPU_IDS, else 0)
  RAG_SERVER_ADDR_DIR      as --save-address-to
  WIKI2018_WORK_DIR        the folder of e5.index/e5_Flat.index (or the folder e5.index/e5_Flat that build_index.sh makes),
                           wiki_corpus.jsonl and wiki_webpages.jsonl (default data/wiki2018), for those of --index_path,
                           --corpus_path and --pages_path that are not given. DATA_DIR is taken, too

Examples
  bash recipes/searchr1/launch_server.sh --index_path indices/wiki --port 5005
  bash recipes/searchr1/launch_server.sh --retriever_name bm25 --corpus_path data/searchr1/corpus.jsonl
  WIKI2018_WORK_DIR=/data/wiki2018 RAG_SERVER_ADDR_DIR=addresses bash recipes/searchr1/launch_server.sh 0,1 --host 0.0.0.0
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_help "$@"

# Whether one of the names stands among the arguments, with its value behind a blank or a =.
given() {
    local name argument
    for name in "$@"; do
        for argument in ${arguments[@]+"${arguments[@]}"}; do
            case $argument in "$name" | "$name="*) return 0 ;; esac
        done
    done
    return 1
}

positional=()
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do positional+=("$1"); shift; done
arguments=("$@")
gpu=${USE_FAISS_GPU:-0} port=8000 own_corpus=''
case ${#positional[@]} in
0) ;;
1) export CUDA_VISIBLE_DEVICES=${positional[0]} gpu=${USE_FAISS_GPU:-1} port=7000 ;;
2) PORT=${positional[0]} RAG_SERVER_ADDR_DIR=${positional[1]} ;;
*) rlflow_fail "expected GPU_IDS, or PORT ADDR_DIR, before the options, found: ${positional[*]}" ;;
esac

given --retriever_name || [ -z "${RETRIEVER_NAME:-}" ] || arguments+=(--retriever_name "$RETRIEVER_NAME")
given --retriever_model || [ -z "${RETRIEVER_PATH:-}" ] || arguments+=(--retriever_model "$RETRIEVER_PATH")
given --topk --top-k || arguments+=(--topk "${TOPK:-3}")
given --port || arguments+=(--port "${PORT:-$port}")
given --save-address-to || [ -z "${RAG_SERVER_ADDR_DIR:-}" ] || arguments+=(--save-address-to "$RAG_SERVER_ADDR_DIR")
[ "$gpu" != 1 ] || given --faiss_gpu || arguments+=(--faiss_gpu)

data=${WIKI2018_WORK_DIR:-${DATA_DIR:-data/wiki2018}}
default() { # flag, file under DATA_DIR
    [ -f "$data/$2" ] || rlflow_fail "$data/$2: no such file; give $1, or WIKI2018_WORK_DIR, the folder that holds it"
    arguments+=("$1" "$data/$2")
}
if ! given --index_path --index --retriever; then
    case " ${arguments[*]} " in
    *" bm25 "* | *"=bm25 "*) ;;
    *)
        for folder in "$data/e5.index/e5_Flat" indexes/e5_Flat; do # as build_index.sh makes them; they know their corpus
            [ ! -f "$data/e5.index/e5_Flat.index" ] && [ -f "$folder/meta.json" ] || continue
            arguments+=(--index_path "$folder") own_corpus=1
            break
        done
        [ -n "$own_corpus" ] || default --index_path e5.index/e5_Flat.index
        ;;
    esac
    [ -n "$own_corpus" ] || given --corpus_path --corpus || default --corpus_path wiki_corpus.jsonl
    given --pages_path --pages || [ ! -f "$data/wiki_webpages.jsonl" ] || arguments+=(--pages_path "$data/wiki_webpages.jsonl")
fi

rlflow_setup run
exec "$RLFLOW_PYTHON" -m rlflow_environments.retrieval serve "${arguments[@]}"
