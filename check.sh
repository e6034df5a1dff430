#!/usr/bin/env bash
# Everything a change must pass: format, lint, types, tests (among them: the wheel, installed, plans an example).
#
#   ./check.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

./setup.sh --dev
export OMP_NUM_THREADS=1

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -n 2 --dist worksteal -q "$@"
