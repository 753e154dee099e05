#!/usr/bin/env bash
# Makes the demo's starting policy again: supervised fine-tuning of a tiny model on clumsy search traces. `--help` lists the options.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_setup run
cd "$RLFLOW_ROOT"
exec "$RLFLOW_PYTHON" -m recipes.searchr1.warm_up "$@"
