#!/usr/bin/env bash
# Makes the demo's starting policy again: that of recipes/searchr1, fine-tuned on demonstrations with pages. `--help` lists the options.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=../common.sh
. "$here/../common.sh"
rlflow_setup run
cd "$RLFLOW_ROOT"
exec "$RLFLOW_PYTHON" -m recipes.asearcher.warm_up "$@"
