#!/usr/bin/env bash
# Builds the index of a corpus for launch_server.sh; `--help` explains it.
set -euo pipefail

usage() {
    cat <<'TEXT'
Build the index of a corpus, with the flags of the field's index_builder.py. It goes on where it was stopped when it is given again, and takes
corpora larger than memory (faiss_type Flat).

  bash recipes/searchr1/build_index.sh [--corpus_path FILE] [OPTIONS]

Options (more: rlflow search build --help, whose options are taken too)
  --corpus_path FILE        the passages: {"id", "contents"} or {"title", "text"} per line (default $WIKI2018_WORK_DIR/wiki_corpus.jsonl)
  --save_dir DIR            the index is the folder {retrieval_method}_{faiss_type} in it; default indexes/, and without --corpus_path
                            $WIKI2018_WORK_DIR/e5.index, where launch_server.sh looks first
  --retrieval_method NAME   e5 (default), bge, ...: the encoder's family; bm25 needs no model
  --model_path PATH         the encoder (default intfloat/e5-base-v2)
  --faiss_type TYPE         Flat (default), SQ8, IVF4096,SQ8, HNSW32, ...
  --max_length N            tokens of a passage, prefix included (default 256, as the servers use for queries)
  --batch_size N            passages per pass of the model
  --pooling_method NAME     instead of the family's
  --use_fp16                the encoder's weights in float16 (on a GPU)
  --device NAME             cuda (default where there is a GPU) or cpu

Environment variable
  WIKI2018_WORK_DIR         the folder of the corpus and the index (default data/wiki2018)

Examples
  WIKI2018_WORK_DIR=/data/wiki2018 bash recipes/searchr1/build_index.sh --model_path models/e5-base-v2 --use_fp16
  bash recipes/searchr1/build_index.sh --corpus_path wiki-18.jsonl --use_fp16
  bash recipes/searchr1/build_index.sh --corpus_path corpus.jsonl --retrieval_method bm25
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
corpus='' save_dir='' method=e5 model=intfloat/e5-base-v2 type=Flat half=0
device=cpu; rlflow_has_gpu && device=cuda
options=()
while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case $1 in
    -h | --help) usage; exit 0 ;;
    --use_fp16) half=1; shift; continue ;;
    --save_embedding) rlflow_say "--save_embedding: Flat is the embeddings; for other types add ,RFlat to --faiss_type"; shift; continue ;;
    --faiss_gpu) rlflow_say "--faiss_gpu: indices are filled on the CPU; encoding, which takes the time, uses --device"; shift; continue ;;
    esac
    [ $# -ge 2 ] || rlflow_fail "$1: expected a value; see --help"
    case $1 in
    --corpus_path) corpus=$(rlflow_path "$2") ;;
    --save_dir) save_dir=$2 ;;
    --retrieval_method) method=$2 ;;
    --model_path) model=$(rlflow_path "$2") ;;
    --faiss_type) type=$2 ;;
    --max_length) options+=(--max-length "$2") ;;
    --batch_size) options+=(--batch "$2") ;;
    --pooling_method) options+=(--pooling "$2") ;;
    --device) device=$2 ;;
    *) options+=("$1" "$2") ;;
    esac
    shift 2
done
if [ -z "$corpus" ]; then
    data=${WIKI2018_WORK_DIR:-data/wiki2018}
    [ -f "$data/wiki_corpus.jsonl" ] ||
        rlflow_fail "$data/wiki_corpus.jsonl: no such file; give --corpus_path FILE, or WIKI2018_WORK_DIR, the folder that holds it"
    corpus=$data/wiki_corpus.jsonl save_dir=${save_dir:-$data/$method.index}
fi
save_dir=${save_dir:-indexes}
case $save_dir in /*) ;; *) save_dir=$PWD/$save_dir ;; esac

rlflow_setup run
if [ "$method" = bm25 ]; then
    exec "$RLFLOW_PYTHON" -m rlflow_environments.retrieval build --corpus "$corpus" --out "$save_dir/bm25" --index bm25 ${options[@]+"${options[@]}"}
fi
family=$("$RLFLOW_PYTHON" -c 'import sys; from rlflow_environments.retrieval.encoders import encoder_family; print(encoder_family(sys.argv[1]))' "$method")
[ "$half" = 0 ] || [ "$device" = cpu ] || options+=(--encoder-dtype float16)
exec "$RLFLOW_PYTHON" -m rlflow_environments.retrieval build --corpus "$corpus" --out "$save_dir/${method}_${type//,/_}" --index "$type" \
    --encoder "$model" --family "$family" --device "$device" ${options[@]+"${options[@]}"}
