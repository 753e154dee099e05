#!/usr/bin/env bash
# Runs the checks: ruff, then pytest.
#
#   bash tests/run.sh [--full | --matrix] [pytest arguments]
#
#   (none)    every claim at its smallest size; 7 minutes on two cores, more where they are slow
#   --full    also kill tests, real engines, other packages' versions; 40 to 90 minutes
#   --matrix  instead the same claims in every layout, family and preset, and with another megatron-core; under 60 minutes
#
# RLFLOW_TEST_PROCESSES=1 runs one test after another (3; 2 with --full and --matrix). Both of these make environments with vLLM,
# TRL, Transformer Engine's Python, what the adapters adapt and another megatron-core, once, where that can be (5.1 GB;
# RLFLOW_VLLM_PYTHON and others: see environments.sh; `none` leaves one out). The tests of adapters, and of the other megatron-core,
# run when there are no further arguments.
# All tests with another megatron-core: make an environment that has it the active one.
#
# Examples: bash tests/run.sh tests/unit -k losses
#           bash tests/run.sh -p tests.cost       which files cost the most processor seconds
#           bash tests/run.sh --full -x
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
# shellcheck source=../recipes/common.sh
. "$here/../recipes/common.sh"

select='not slow and not gpu' kind='' processes=3
case ${1:-} in
--full) kind=full processes=2 select='not matrix and not gpu' ;;
--matrix) kind=matrix processes=2 select='matrix and not gpu' ;;
esac
if [ -n "$kind" ]; then
    shift
    rlflow_has_gpu && select=${select% and not gpu}
fi
rlflow_setup test
if [ -n "$kind" ]; then
    # shellcheck source=environments.sh
    . "$here/environments.sh"
    rlflow_environments
fi
cd "$RLFLOW_ROOT"
# One thread per process: some tests start several ranks, and torch's threads wait busily for each other on shared cores.
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
status=0
"$RLFLOW_PYTHON" -m ruff check --quiet --output-format concise . || status=1
"$RLFLOW_PYTHON" -m ruff format --quiet --check . || { echo "ruff format: see 'make format'"; status=1; }
[ $status -eq 0 ] && echo "ruff: no findings" || echo "ruff: findings above"
# Processes that take whole files in their order: the files of several ranks come first and take longest. Three on two cores,
# as many tests wait.
pytest=(-m pytest -n "${RLFLOW_TEST_PROCESSES:-$processes}" --dist loadfile --no-loadscope-reorder)
"$RLFLOW_PYTHON" "${pytest[@]}" -m "$select" "$@" || status=$?
if [ "$kind" = full ] && [ $# -eq 0 ]; then
    for python in $RLFLOW_ADAPTERS; do
        "$python" -m pytest -m "$select" tests/unit/environments/adapters || status=$?
    done
elif [ "$kind" = matrix ] && [ $# -eq 0 ] && [ -n "$RLFLOW_MEGATRON" ]; then
    "$RLFLOW_MEGATRON" "${pytest[@]}" -m 'not slow and not gpu' \
        tests/dist/test_{layouts,resume_layouts,lora,critic,convert_layouts}.py tests/unit/{trainer,tools} || status=$?
fi
exit $status
