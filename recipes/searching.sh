# The options of run_train.sh and run_eval.sh of the search recipes. Sourced after common.sh, never executed.

RLFLOW_TRAIN_OPTIONS=(--short --config --model --model-kind --preset --train-data --val-data --corpus --pages --resume --overwrite --dry-run --out --help)
RLFLOW_EVAL_OPTIONS=(--model --server --server-model --api-key-variable --hf --data --corpus --pages --config --questions --samples
    --temperature --out --overwrite --allow-code --help)

# Reads the arguments of a run_train.sh into config, own_data, short, recipe (with --recipe only), kind (with --model-kind only),
# arguments and overrides.
# RLFLOW_RECIPES: the names that --recipe takes; empty: there is no such option.
rlflow_read_train() {
    config='' own_data='' short='' recipe='' kind='' arguments=() overrides=()
    local name value options=("${RLFLOW_TRAIN_OPTIONS[@]}")
    [ -z "${RLFLOW_RECIPES:-}" ] || options=(--recipe "${options[@]}")
    while [ $# -gt 0 ]; do
        case $1 in
        --config | --preset | --model | --model-kind | --train-data | --val-data | --corpus | --pages | --recipe | --out)
            [ $# -ge 2 ] || rlflow_fail "$1 needs a value; see --help"
            name=$1 value=$2
            shift 2
            set -- "$name=$value" "$@"
            ;;
        --recipe=*)
            recipe=${1#*=}
            case " ${RLFLOW_RECIPES:-} " in
            "  ") rlflow_unknown --recipe "${options[@]}" ;;
            *" $recipe "*) shift ;;
            *) rlflow_fail "--recipe: expected one of: $RLFLOW_RECIPES, found '$recipe'" ;;
            esac
            ;;
        --model-kind=*)
            kind=${1#*=}
            case " ${RLFLOW_KINDS:-} " in
            "  ") rlflow_unknown --model-kind "${options[@]}" ;;
            *" $kind "*) shift ;;
            *) rlflow_fail "--model-kind: expected one of: $RLFLOW_KINDS, found '$kind'" ;;
            esac
            ;;
        --config=*) config=$(rlflow_path "${1#*=}"); shift ;;
        --out=*) arguments+=(--out "$(realpath -m "${1#*=}")"); shift ;;
        --preset=*) arguments+=(--preset "${1#*=}"); shift ;;
        --model=* | --corpus=* | --pages=*) arguments+=("${1%%=*}" "$(rlflow_path "${1#*=}")"); shift ;;
        --train-data=* | --val-data=*)
            own_data=1 name=${1%%=*} value=$(rlflow_path "${1#*=}")
            shift
            # A folder holds sets, of which a recipe may take some: only its place is given then.
            if [ "$name" = --val-data ] && [ -d "$value" ] && [ -n "${RLFLOW_RECIPES:-}" ]; then
                overrides+=("environment.val.path=$value")
            else
                arguments+=("$name" "$value")
            fi
            ;;
        --short) short=1; shift ;;
        --resume | --overwrite | --dry-run | --env=*) arguments+=("$1"); shift ;;
        -*) rlflow_unknown "$1" "${options[@]}" ;;
        *=*) overrides+=("$1"); shift ;;
        *) config=$(rlflow_named_config "$1"); shift ;;
        esac
    done
}

# The file of a configuration that lies beside the script (in $here/config), by its name.
rlflow_named_config() {
    local file=$here/config/${1%.yaml}.yaml names
    if [ ! -f "$file" ]; then
        names=$(cd "$here/config" && printf '%s ' *.yaml)
        rlflow_fail "unexpected argument '$1': expected section.key=value, or one of the configurations ${names//.yaml/}; see --help"
    fi
    printf '%s\n' "$file"
}

# Runs rlflow (RLFLOW_PROFILE: in a Python for that job) in the repository, to which the paths of a configuration file are relative.
rlflow_exec() {
    rlflow_setup "${RLFLOW_PROFILE:-run}"
    RLFLOW_CALLED_IN=$(pwd -P) # printed commands have to work there
    export RLFLOW_CALLED_IN
    cd "$RLFLOW_ROOT"
    exec "$RLFLOW_PYTHON" -m rlflow "$@"
}

# Trains with the configuration and with what rlflow_read_train has read; options first: argparse wants the overrides together.
rlflow_train() { rlflow_exec train --config "$config" ${arguments[@]+"${arguments[@]}"} ${overrides[@]+"${overrides[@]}"}; }

# Evaluates with the arguments of a run_eval.sh, after the configuration that is used where neither --config nor the model names one.
rlflow_evaluate() {
    local default=$1 config='' model='' name value arguments=() overrides=()
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        --config | --model | --server | --server-model | --api-key-variable | --hf | --data | --corpus | --pages | --out | \
            --questions | --temperature | --samples)
            [ $# -ge 2 ] || rlflow_fail "$1 needs a value; see --help"
            name=$1 value=$2
            shift 2
            set -- "$name=$value" "$@"
            ;;
        --config=*) config=$(rlflow_path "${1#*=}"); shift ;;
        --out=*) arguments+=(--out "$(realpath -m "${1#*=}")"); shift ;;
        --model=*) model=$(rlflow_path "${1#*=}"); shift ;;
        --hf=*) arguments+=(--hf "$(rlflow_path "${1#*=}")"); shift ;;
        --data=* | --corpus=* | --pages=*) arguments+=("${1%%=*}" "$(rlflow_path "${1#*=}")"); shift ;;
        --questions=* | --temperature=* | --samples=* | --allow-code | --overwrite | --env=* | \
            --server=* | --server-model=* | --api-key-variable=*) arguments+=("$1"); shift ;;
        -*) rlflow_unknown "$1" "${RLFLOW_EVAL_OPTIONS[@]}" ;;
        *=*) overrides+=("$1"); shift ;;
        *) config=$(rlflow_named_config "$1"); shift ;;
        esac
    done
    # `rlflow eval` finds the configuration of the run that the model is, is the export of, or is a checkpoint of.
    [ -n "$config" ] || [ -f "$model/config.yaml" ] || [ -f "$model/../config.yaml" ] || [ -f "$model/../../config.yaml" ] ||
        [ -f "$model/../../../config.yaml" ] || config=$default
    [ -z "$config" ] || arguments+=(--config "$config")
    [ -z "$model" ] || arguments+=(--model "$model")
    rlflow_exec eval ${arguments[@]+"${arguments[@]}"} ${overrides[@]+"${overrides[@]}"}
}
