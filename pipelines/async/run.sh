#!/usr/bin/env bash
# Starts the explorer and the trainer of its folder beside each other, with the same arguments; stops both where
# one fails. In pipelines/serve the explorer is the endpoint.
#   bash pipelines/async/run.sh [KEY=VALUE...]
set -euo pipefail
here=$(dirname "$0")
trinity-data run "$here/explorer.yaml" "$@" &
explorer=$!
trinity-data run "$here/trainer.yaml" "$@" &
trainer=$!
trap 'kill "$explorer" "$trainer" 2>/dev/null || true' EXIT
wait -n
wait "$explorer"
wait "$trainer"
