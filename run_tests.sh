#!/usr/bin/env bash
# Run the tests; arguments go to pytest. scripts/environment.sh lists the variables that choose the Python environment.
set -euo pipefail
cd "$(dirname "$0")"
EXTRAS="[test]"
source scripts/environment.sh
exec python -m pytest "$@"
