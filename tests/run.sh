#!/usr/bin/env bash
# Runs the checks: ruff, then pytest.
#
#   bash tests/run.sh [--full] [pytest arguments]
#
#   (none)   every claim at its smallest size; under 10 minutes on two cores
#   --full   also the slow matrices, kill tests and real engines; under 60 minutes
#
# RLFLOW_TEST_PROCESSES=1 runs one test after another (2). --full makes environments with vLLM, TRL, Transformer Engine's Python, what the
# adapters adapt and another megatron-core, once, where that can be (5.1 GB; RLFLOW_VLLM_PYTHON and others: see environments.sh; `none`
# leaves one out). The tests of adapters, endpoint and the other megatron-core run when --full has no further arguments.
# All tests with another megatron-core: make an environment that has it the active one.
#
# Examples: bash tests/run.sh tests/unit -k losses
#           bash tests/run.sh --full -x
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
# shellcheck source=../recipes/common.sh
. "$here/../recipes/common.sh"

select='not slow and not gpu'
if [ "${1:-}" = --full ]; then
    shift
    select='not gpu'
    rlflow_has_gpu && select=''
    full=1
fi
rlflow_setup test
if [ -n "${full:-}" ]; then
    # shellcheck source=environments.sh
    . "$here/environments.sh"
    rlflow_environments
fi
cd "$RLFLOW_ROOT"
# One thread per process: some tests start several ranks, and torch's threads wait busily for each other on shared cores.
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
status=0
"$RLFLOW_PYTHON" -m ruff check --quiet --output-format concise . || status=1
[ $status -eq 0 ] && echo "ruff: no findings" || echo "ruff: findings above"
# Two processes, each with whole files in their order: the files of several ranks come first and take longest.
pytest=(-m pytest -n "${RLFLOW_TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder)
"$RLFLOW_PYTHON" "${pytest[@]}" -m "$select" "$@" || status=$?
if [ -n "${full:-}" ] && [ $# -eq 0 ]; then
    for python in $RLFLOW_ADAPTERS; do
        "$python" -m pytest -m "$select" tests/unit/environments/adapters tests/unit/endpoint || status=$?
    done
    [ -z "$RLFLOW_MEGATRON" ] || "$RLFLOW_MEGATRON" "${pytest[@]}" -m 'not slow and not gpu' \
        tests/dist/test_{layouts,resume_layouts,lora,critic,convert_layouts}.py tests/unit/{trainer,tools} || status=$?
fi
exit $status
