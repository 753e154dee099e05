# Makes the environments of the tests of the adapters. Sourced by run.sh for --full, never executed.
#
#   RLFLOW_ADAPTERS=none      no tests with the adapters' packages
#   (unset)                   two environments are made in ${XDG_CACHE_HOME:-~/.cache}/rlflow, once: 0.7 GB, some minutes
#
# They lie over the environment of the tests, so that only what is missing there is installed. Two, because verifiers 0.4 has dropped
# what 0.3 is. Where one cannot be made, its tests are skipped; nothing fails.

RLFLOW_ADAPTERS_PACKAGES=("gymnasium==1.4.0 reasoning-gym==0.1.25 openenv==0.10.0 verifiers==0.3.1" "verifiers==0.4.0")
RLFLOW_ADAPTERS_DISK_GIB=2

# Arguments: directory, packages ...
rlflow_adapters_install() {
    local venv=$1 below site
    shift
    below=$("$RLFLOW_PYTHON" -c 'import site; print(site.getsitepackages()[0])') || return 1
    rm -rf "$venv"
    "$RLFLOW_PYTHON" -m venv "$venv" || return 1
    site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])') || return 1
    echo "import site; site.addsitedir('$below')" >"$site/zz_below.pth"
    "$venv/bin/python" -m pip install "$@" || return 1
    "$venv/bin/python" -c 'import rlflow, pytest, verifiers' || return 1
    echo "$RLFLOW_PYTHON $*" >"$venv/.ready"
}

# Prints the interpreter of each environment that is there or can be made, and says why one is not.
rlflow_adapters() {
    local cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlflow number=0 packages venv free
    if [ "${RLFLOW_ADAPTERS:-}" = none ]; then
        rlflow_say "tests of the adapters with their packages are skipped: RLFLOW_ADAPTERS=none"
        return
    fi
    mkdir -p "$cache"
    for packages in "${RLFLOW_ADAPTERS_PACKAGES[@]}"; do
        number=$((number + 1)) venv=$cache/adapters-$number
        if [ "$(cat "$venv/.ready" 2>/dev/null)" != "$RLFLOW_PYTHON $packages" ]; then
            free=$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')
            if [ "$free" -lt "$RLFLOW_ADAPTERS_DISK_GIB" ]; then
                rlflow_say "tests with $packages are skipped: $free GiB are free in $cache, $RLFLOW_ADAPTERS_DISK_GIB are needed"
                continue
            fi
            rlflow_say "installing $packages in $venv (once; RLFLOW_ADAPTERS=none leaves it out) ..."
            # shellcheck disable=SC2086 -- several words
            if ! (rlflow_adapters_install "$venv" $packages) >"$venv.log" 2>&1; then
                rm -rf "$venv"
                rlflow_say "tests with $packages are skipped: $(grep -i error "$venv.log" | tail -n 1 | cut -c1-200) ($venv.log)"
                continue
            fi
        fi
        echo "$venv/bin/python"
    done
}
