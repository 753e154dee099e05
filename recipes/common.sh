# Finds or makes the Python environment of rlflow. Sourced by the run scripts, never executed:
#
#   . recipes/common.sh
#   rlflow_setup run      # or: cluster (adds Ray), test (adds Ray, Qdrant, pytest, ruff, mypy)
#   exec "$RLFLOW_PYTHON" ...
#
# An active environment that already has rlflow with what is needed is used as it is. Otherwise .venv in the repository
# (or $RLFLOW_VENV) is created once; a stamp in it makes every later start skip the set-up.

RLFLOW_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

RLFLOW_CPU_INDEX=https://download.pytorch.org/whl/cpu # PyTorch's own, of CPU builds

# Prints the script's `usage` and exits if the arguments ask for it. Its commands can be pasted: `rlflow` is in .venv
# where the shell does not find it.
rlflow_help() {
    local argument called=rlflow
    command -v rlflow >/dev/null || called=.venv/bin/rlflow
    for argument in "$@"; do
        case $argument in -h | --help) usage | sed -E "s#\brlflow (algorithm|search|serve|show|train) #$called \1 #g"; exit 0 ;; esac
    done
}

rlflow_say() { printf '[rlflow] %s\n' "$*" >&2; }
rlflow_fail() { printf '[rlflow] error: %s\n' "$*" >&2; exit 2; }

# The absolute form of a path, so that it survives a change of directory. A name that is no file here stays as it is.
rlflow_path() {
    case $1 in /*) echo "$1" ;; *) if [ -e "$1" ]; then echo "$PWD/$1"; else echo "$1"; fi ;; esac
}

# Fails for an option that is not among the others, with the one that was meant: the same letters in another order, or the same
# beginning.
rlflow_unknown() {
    local given=$1 known meant=''
    shift
    rlflow_letters() { printf %s "${1%%=*}" | fold -w 1 | sort | tr -d '\n'; }
    for known in "$@"; do
        if [ "$(rlflow_letters "$known")" = "$(rlflow_letters "$given")" ] || [ "${known:0:4}" = "${given:0:4}" ]; then meant=$known; fi
    done
    rlflow_fail "unknown option '$given'.${meant:+ Did you mean '$meant'?} The options: bash $0 --help"
}

# ---------------------------------------------------------------------------------------------------------------- platform

rlflow_check_platform() {
    local system machine
    system=$(uname -s) machine=$(uname -m)
    [ "$system/$machine" = Linux/x86_64 ] && return
    [ "$system" = Darwin ] && rlflow_fail "macOS is not supported (expected Linux x86_64). Use a Linux machine or container."
    case $system in MINGW* | MSYS* | CYGWIN*) rlflow_fail "found Windows ($system), expected Linux x86_64. Run it inside WSL2." ;; esac
    rlflow_fail "found $system $machine, expected Linux x86_64 (WSL2 included): some packages have no wheels for it."
}

rlflow_has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# The CPU cores that this process may use: the affinity mask, cut by a container's quota, which torch does not look at.
rlflow_cores() {
    local cores quota period
    cores=$(nproc 2>/dev/null || echo 1)
    if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
        quota=$(((quota + period - 1) / period))
        [ "$quota" -lt "$cores" ] && cores=$quota
    fi
    [ "$cores" -ge 1 ] && echo "$cores" || echo 1
}

rlflow_export_defaults() {
    # Busy-waiting OpenMP threads slow a small matrix product by a factor of 50 when cores are shared.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
    local cores; cores=$(rlflow_cores)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 16 ? cores : 16))}
    # No telemetry unless the user asked for it.
    export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0} HF_HUB_DISABLE_TELEMETRY=${HF_HUB_DISABLE_TELEMETRY:-1}
    export DO_NOT_TRACK=${DO_NOT_TRACK:-1}
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
}

# ------------------------------------------------------------------------------------------------------- active environment

rlflow_extras() {
    case $1 in
        run) echo search ;;
        browser) echo search,miniwob ;;
        nethack) echo search,nethack ;;
        real) echo search,gguf ;;
        cluster) echo search,ray ;;
        test) echo test ;;
    esac
}

# Prints where a Python finds rlflow and which modules it lacks for a profile; fails if it is too old or has no rlflow.
# Imports nothing heavy; -P keeps the current directory, which may hold the sources, out of the search path.
rlflow_inspect() {
    "$1" -P -c '
import os, sys
from importlib.util import find_spec

def found(name):
    try:
        return find_spec(name) is not None
    except ImportError:
        return False

names = ["torch", "yaml", "numpy", "safetensors", "transformers", "megatron.core", "psutil", "rich", "matplotlib"]
names += ["orjson", "faiss", "bm25s", "aiohttp", "uvicorn", "rlflow_environments"]
if sys.argv[1] == "browser":
    names += ["miniwob"]
if sys.argv[1] == "nethack":
    names += ["nle"]
if sys.argv[1] == "real":
    names += ["gguf"]
if sys.argv[1] == "cluster":
    names += ["ray"]
if sys.argv[1] == "test":
    names += ["uvloop", "httptools", "prometheus_client", "qdrant_client", "qdrant_edge"]
    names += ["ray", "tensorboard", "pytest", "pytest_timeout", "hypothesis", "ruff", "mypy"]
    names += ["openai", "anthropic", "smolagents", "langgraph", "langchain_openai", "peft"]
    names += ["gymnasium", "math_verify", "mcp", "nle", "gguf", "pyarrow"]
spec = find_spec("rlflow")
if spec is None or not spec.origin:
    sys.exit(1)
print(os.path.dirname(os.path.realpath(spec.origin)))
print(*[name for name in names if not found(name)])
' "$2" 2>/dev/null
}

# Sets RLFLOW_PYTHON and succeeds if the active environment can do the job.
rlflow_use_active() {
    local python report origin missing
    python=$(command -v python || command -v python3) || return 1
    [ "$(dirname "$python")" = "$RLFLOW_ROOT/.venv/bin" ] && return 1 # ours: the stamp decides
    report=$(rlflow_inspect "$python" "$1") || return 1
    origin=${report%%$'\n'*} missing=
    case $report in *$'\n'*) missing=${report#*$'\n'} ;; esac
    if [ -n "$missing" ]; then
        rlflow_say "the active environment ($python) has rlflow but lacks: $missing"
        rlflow_say "using .venv instead; to use yours: pip install -e '$RLFLOW_ROOT[$(rlflow_extras "$1")]'"
        return 1
    fi
    [ "$origin" = "$RLFLOW_ROOT/rlflow" ] || rlflow_say "note: the active environment's rlflow is $origin, not this repository's"
    RLFLOW_PYTHON=$python
}

# ---------------------------------------------------------------------------------------------------------------- set-up

rlflow_find_python() {
    local name
    for name in ${RLFLOW_BASE_PYTHON:-python3 python3.12 python3.11 python3.13 python}; do
        command -v "$name" >/dev/null 2>&1 || continue
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$name"; return; }
    done
    return 1
}

# How many packages are in the environment whose log this is.
rlflow_installed() { { find "${RLFLOW_SETUP_LOG%.log}"/lib -maxdepth 3 -name '*.dist-info' 2>/dev/null || :; } | wc -l; }

# What pip does, as far as its log from byte $1 tells: a package and its size, or how many it has installed beyond $2.
rlflow_doing() {
    tail -c "+$1" "$RLFLOW_SETUP_LOG" | awk -v there="$(($(rlflow_installed) - $2))" '
        $1 == "Downloading" || $1 == "Processing" {
            parts = split($2, path, "/")
            split(path[parts], name, "-")
            doing = tolower($1) " " name[1] " " name[2] (NF > 3 ? " " $3 " " $4 : "")
        }
        /^Installing collected packages:/ { doing = "installing packages: " there " of " NF - 3 }
        END { print doing ? doing : "preparing" }'
}

# Says what a step does while this shell lives: in a terminal one line that changes, elsewhere a line now and then.
rlflow_watch() {
    local from=$1 before=$2 start=$SECONDS told=$SECONDS
    while sleep 1 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        if [ -t 2 ]; then
            printf '\r\033[K[rlflow]   %.68s' "$((SECONDS - start)) s: $(rlflow_doing "$from" "$before")" >&2
        elif [ $((SECONDS - told)) -ge "${RLFLOW_PROGRESS_S:-15}" ]; then
            rlflow_say "  $((SECONDS - start)) s: $(rlflow_doing "$from" "$before")"
            told=$SECONDS
        fi
    done
}

# Runs a step with its output in the log; says what, how far it is and how long it took. Arguments: sentence, command ...
rlflow_step() {
    local sentence=$1 start=$SECONDS status=0 from before watch
    shift
    from=$(($(wc -c <"$RLFLOW_SETUP_LOG") + 1)) before=$(rlflow_installed)
    rlflow_say "$sentence ..."
    rlflow_watch "$from" "$before" 9>&- &
    watch=$!
    "$@" >>"$RLFLOW_SETUP_LOG" 2>&1 || status=$?
    kill $watch 2>/dev/null || :
    wait $watch 2>/dev/null || :
    [ ! -t 2 ] || printf '\r\033[K' >&2
    [ $status -eq 0 ] && rlflow_say "  done in $((SECONDS - start)) s"
    return $status
}

rlflow_step_or_fail() {
    rlflow_step "$@" && return
    rlflow_pip_reason | sed 's/^/    /' >&2
    rm -f "$RLFLOW_SETUP_MARK" # a clean failure: what is installed so far is whole and serves the next attempt
    rlflow_fail "the last step failed: $(rlflow_pip_advice) Then start again. The whole log: $RLFLOW_SETUP_LOG"
}

# The lines of the log in which pip says why it failed: its errors and the requirements that exclude each other, without those that
# only say that it failed. The last lines where it says nothing of the kind.
rlflow_pip_reason() {
    local reason
    reason=$(tail -n 400 "$RLFLOW_SETUP_LOG" | awk '
        /^ERROR: (ResolutionImpossible|Failed to build installable wheels)/ { next }
        /^The conflict is caused by:/ { conflict = 1 }
        /^$/ || /^To fix this/ { if (conflict > 1) conflict = 0 }
        conflict { conflict++; print; next }
        /^ *(ERROR|error):/ { print }' | cut -c1-300 | tail -n 15)
    [ -n "$reason" ] && echo "$reason" || tail -n 15 "$RLFLOW_SETUP_LOG"
}

# What to do about the failure that the end of the log shows.
rlflow_pip_advice() {
    local python; python=$("$(dirname "$RLFLOW_PYTHON")/python" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null) || python=
    case $(tail -n 200 "$RLFLOW_SETUP_LOG") in
        *'No space left'* | *'Disk quota exceeded'*)
            echo "no disk space is left for $(dirname "$RLFLOW_SETUP_LOG"); free some (the environment takes 2 to 3 GB), or set RLFLOW_VENV to another disk." ;;
        *'Requires-Python'* | *'requires a different Python'*)
            echo "a package above needs another Python than this${python:+ one ($python)}; name a newer one in RLFLOW_BASE_PYTHON, or correct its version in constraints/cpu.txt." ;;
        *'ResolutionImpossible'* | *'conflicting dependencies'*)
            echo "the versions above exclude each other${python:+ on Python $python}; correct constraints/cpu.txt or setup.py." ;;
        *'Failed to establish a new connection'* | *'name resolution'* | *'Name or service not known'* | *'timed out'* | *'ConnectionError'* | *'SSLError'* | *'ProxyError'*)
            echo "pip does not reach its package index; check the network, or pip's own settings (pip config list)." ;;
        *"command 'gcc' failed"* | *"command 'x86_64-linux-gnu-gcc' failed"* | *'gcc: No such file'* | *'No such file or directory: '*gcc* | *'Failed building wheel'* | *'Failed to build'*)
            echo "a package above has no wheel for this Python${python:+ ($python)} and cannot be compiled here; take Python 3.11 to 3.13 (RLFLOW_BASE_PYTHON) or install a compiler." ;;
        *) echo "see pip's words above." ;;
    esac
}

# The CPU build of torch where there is no NVIDIA GPU: what pip's own configuration offers, else PyTorch's CPU index, else plain.
rlflow_install_torch() {
    local pip=("$1/bin/python" -m pip install --no-deps) version index=$RLFLOW_CPU_INDEX
    version=$(sed -n 's/^torch==//p' "$RLFLOW_ROOT/constraints/cpu.txt")
    "$1/bin/python" -c 'import sys, importlib.metadata as m; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' \
        "$version" 2>/dev/null && return
    if rlflow_has_gpu; then
        rlflow_step_or_fail "NVIDIA GPU found: installing torch $version (a few GB)" "${pip[@]}" "torch==$version"
        return
    fi
    rlflow_step "no NVIDIA GPU: installing the CPU build of torch $version (200 MB)" "${pip[@]}" "torch==$version+cpu" && return
    # Newer pips call it a conflict where a constraint of the machine's own names torch.
    if ! tail -n 15 "$RLFLOW_SETUP_LOG" | grep -qE "No matching distribution|Cannot install torch==$version\+cpu because"; then
        rlflow_step_or_fail "trying again" "${pip[@]}" "torch==$version+cpu"
        return
    fi
    if timeout 8 "$1/bin/python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$index/torch/" 2>/dev/null; then
        rlflow_step "  pip's configuration has none: taking it from $index" "${pip[@]}" --index-url "$index" "torch==$version+cpu" &&
            return
    fi
    rlflow_step_or_fail "  no CPU build within reach: installing plain torch $version (a few GB; works as well)" \
        "${pip[@]}" "torch==$version"
}

# A virtual environment in $1. What an interrupted set-up left is thrown away: half-installed packages look installed.
rlflow_make_venv() {
    local venv=$1 python
    if [ -f "$RLFLOW_SETUP_MARK" ]; then
        rlflow_say "the last set-up was interrupted: starting again"
        rm -rf "$venv"
    elif [ -d "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        rlflow_fail "$venv exists and is not a virtual environment. Move it away or set RLFLOW_VENV to another place."
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && { touch "$RLFLOW_SETUP_MARK"; return; }
    python=$(rlflow_find_python) ||
        rlflow_fail "found no Python >= 3.11 ($(python3 --version 2>&1)). Install one, or name it in RLFLOW_BASE_PYTHON."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        rlflow_fail "$python has no venv module. Install it (Debian, Ubuntu: apt install python3-venv) and start again."
    touch "$RLFLOW_SETUP_MARK"
    rlflow_step_or_fail "creating $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
}

rlflow_install() {
    local profile=$1 venv=$2 stamp=$3 start=$SECONDS extras
    extras=$(rlflow_extras "$profile")
    rlflow_say "setting up rlflow in $venv (once; a few minutes)"
    : >"$RLFLOW_SETUP_LOG"
    rlflow_make_venv "$venv"
    rlflow_install_torch "$venv"
    rlflow_step_or_fail "installing rlflow[$extras]" \
        "$venv/bin/python" -m pip install -e "$RLFLOW_ROOT[$extras]" -c "$RLFLOW_ROOT/constraints/cpu.txt"
    rm -f "$venv"/.rlflow-*
    printf '%s' "$stamp" >"$venv/.rlflow-$profile"
    rm -f "$RLFLOW_SETUP_MARK"
    rlflow_say "set-up finished in $((SECONDS - start)) s"
}

# Sets RLFLOW_PYTHON to a Python that can do the job: run (train, evaluate), browser, nethack, real, cluster (more than one process) or test.
rlflow_setup() {
    local profile=$1 venv=${RLFLOW_VENV:-$RLFLOW_ROOT/.venv} stamp
    rlflow_check_platform
    rlflow_export_defaults
    if [ -z "${RLFLOW_VENV:-}" ] && rlflow_use_active "$profile"; then return; fi
    RLFLOW_PYTHON=$venv/bin/python RLFLOW_SETUP_LOG=$venv.log RLFLOW_SETUP_MARK=$venv.unfinished
    # The place belongs to the stamp: a moved clone must be installed again. So do the names that an installation keeps.
    stamp=$({
        echo "$RLFLOW_ROOT"
        cat "$RLFLOW_ROOT/setup.py" "$RLFLOW_ROOT/constraints/cpu.txt" "$RLFLOW_ROOT"/*/*/entry_points.ini
        (cd "$RLFLOW_ROOT/environments/wrappers" && echo *.py)
    } | sha256sum | cut -c1-64)
    local larger='run cluster test'
    larger=${larger#"${larger%%"$profile"*}"} # each of these has what the ones before it have
    case $profile in run) larger="$larger browser nethack real" ;; browser | nethack) larger=$profile ;; real) larger='real test' ;; esac
    rlflow_ready() {
        local name
        [ -x "$RLFLOW_PYTHON" ] || return
        for name in $larger; do [ "$(cat "$venv/.rlflow-$name" 2>/dev/null)" != "$stamp" ] || return 0; done
        return 1
    }
    rlflow_ready && return
    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        rlflow_say "another set-up of $venv is under way: waiting for it"
        flock 9
    fi
    rlflow_ready || rlflow_install "$profile" "$venv" "$stamp"
    exec 9>&-
}
