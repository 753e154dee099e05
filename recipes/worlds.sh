# The options of run_train.sh of the worlds, and the tiny policies that they begin with. Sourced after common.sh, never executed.

declare -A RLFLOW_GIVEN=() # what was said of the script's own options, by name; a switch that was given is 1
model='' seed=0 arguments=() overrides=()

# rlflow_read_world OWN ARGUMENT...: OWN names the script's own options, with an = behind those that take a value.
rlflow_read_world() {
    local known=" $1 --model= --dry-run --resume --overwrite --help " name
    shift
    while [ $# -gt 0 ]; do
        name=${1%%=*}
        case $1 in
        -*=*) [[ $known = *" $name= "* ]] || rlflow_unknown "$1" ${known//=/}; RLFLOW_GIVEN[$name]=${1#*=} ;;
        -*)
            if [[ $known = *" $name= "* ]]; then
                [ $# -ge 2 ] || rlflow_fail "$1 needs a value; see --help"
                RLFLOW_GIVEN[$name]=$2
                shift
            else
                [[ $known = *" $name "* ]] || rlflow_unknown "$1" ${known//=/}
                RLFLOW_GIVEN[$name]=1
            fi
            ;;
        *=*) [ "$name" != run.seed ] || seed=${1#*=}; overrides+=("$1") ;;
        *) rlflow_fail "unexpected argument '$1'; see --help" ;;
        esac
        shift
    done
    model=${RLFLOW_GIVEN[--model]:-}
    [ -z "$model" ] || model=$(rlflow_path "$model")
    for name in --dry-run --resume --overwrite; do
        [ -z "${RLFLOW_GIVEN[$name]:-}" ] || arguments+=("$name")
    done
}

# rlflow_world_policy NAME ENVIRONMENT PLAYER [OPTION...]: without --model, a tiny policy that imitates a scripted player
# (runs/NAME-policy-SEED, made once) is the model. A dry run makes none, and looks at everything else.
rlflow_world_policy() {
    local name=$1
    shift
    [ -z "$model" ] || return 0
    model=runs/$name-policy-$seed
    [ ! -f "$model/config.json" ] || return 0
    if [ -n "${RLFLOW_GIVEN[--dry-run]:-}" ]; then
        arguments+=(--model-later)
        overrides=("model.path=$model" ${overrides[@]+"${overrides[@]}"})
        model=
        return 0
    fi
    "$RLFLOW_PYTHON" -m rlflow env policy "$@" --out "$model" --seed "$seed" >/dev/null
}

# Trains with a configuration of the recipe, with what rlflow_read_world has read.
rlflow_train_world() {
    exec "$RLFLOW_PYTHON" -m rlflow train --config "$1" ${model:+--model "$model"} ${arguments[@]+"${arguments[@]}"} \
        ${overrides[@]+"${overrides[@]}"}
}
