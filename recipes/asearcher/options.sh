# What run_train.sh and run_processes.sh share. Sourced after ../searching.sh, never executed.

RLFLOW_PROFILE=cluster
RLFLOW_RECIPES='m2po_delta m2po_full'

# Sets config and the run's name, where no --config was given: the recipe with data, the demo without or with --short.
asearcher_config() {
    [ -z "$config" ] || return 0
    recipe=${recipe:-m2po_delta}
    local name=asearcher-${recipe#m2po_} place=$RLFLOW_ROOT/recipes/asearcher/config
    config=$place/$recipe.yaml
    if [ -n "$short" ] || [ -z "$own_data" ]; then
        name=asearcher-demo-${recipe#m2po_} config=$place/${recipe/m2po/demo}.yaml
    fi
    overrides=("run.name=$name" ${overrides[@]+"${overrides[@]}"}) # what is given later wins
}
