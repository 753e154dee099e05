# Finds or makes the packages of the tests against TRL. Sourced by run.sh for --full, never executed.
#
#   RLFLOW_TRL_PACKAGES=DIR   a folder of packages with TRL, accelerate and datasets, looked into last
#   RLFLOW_TRL_PACKAGES=none  no tests against TRL
#   (unset)                   where the environment of the tests has no TRL, one beside it in ${XDG_CACHE_HOME:-~/.cache}/rlflow, once: 130 MB
#
# It sees the packages of the tests' environment, so torch and transformers are those that are tested, and holds only what these lack.
# Where it cannot be made, the tests are skipped; nothing fails.

rlflow_trl_skip() { rlflow_say "tests against TRL are skipped: $*"; }

rlflow_trl_install() {
    local venv=$1 constraints=$RLFLOW_ROOT/constraints/cpu.txt
    rm -rf "$venv"
    "$RLFLOW_PYTHON" -m venv "$venv" || return 1
    "$RLFLOW_PYTHON" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
        >"$(rlflow_trl_packages "$venv")/tested.pth" || return 1
    "$venv/bin/python" -m pip install -c "$constraints" trl datasets accelerate || return 1
    PYTHONPATH=$RLFLOW_ROOT "$RLFLOW_PYTHON" -c '
import sys
sys.path.append(sys.argv[1])
from trl import GRPOTrainer' "$(rlflow_trl_packages "$venv")" || return 1
    touch "$venv/.ready"
}

rlflow_trl_packages() { "$1/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Sets and exports RLFLOW_TRL_PACKAGES, or unsets it and says why.
rlflow_trl() {
    local cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlflow venv key
    if [ "${RLFLOW_TRL_PACKAGES:-}" = none ]; then
        unset RLFLOW_TRL_PACKAGES
        rlflow_trl_skip "RLFLOW_TRL_PACKAGES=none"
        return
    fi
    [ -n "${RLFLOW_TRL_PACKAGES:-}" ] && { export RLFLOW_TRL_PACKAGES; return; }
    "$RLFLOW_PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("trl", "accelerate", "datasets"))))' && return
    # Of one environment and one set of versions: another one may lack other packages.
    key=$({ echo "$RLFLOW_PYTHON"; cat "$RLFLOW_ROOT/constraints/cpu.txt"; } | sha256sum | cut -c1-12)
    venv=$cache/trl-$key
    mkdir -p "$cache"
    if [ ! -f "$venv/.ready" ]; then
        rlflow_say "installing TRL in $venv (once, 130 MB; RLFLOW_TRL_PACKAGES=none leaves it out) ..."
        if ! (rlflow_trl_install "$venv") >"$venv.log" 2>&1; then
            rm -rf "$venv"
            rlflow_trl_skip "TRL cannot be installed here: $(grep -i error "$venv.log" | tail -n 1 | cut -c1-200) ($venv.log)"
            return
        fi
    fi
    RLFLOW_TRL_PACKAGES=$(rlflow_trl_packages "$venv")
    export RLFLOW_TRL_PACKAGES
}
