#!/usr/bin/env bash
# Plan a GPT for eight A100s, write the program that trains it so, and run that program on this machine's CPU.
#
#   ./demo.sh [FOLDER]      FOLDER (default plans/gpt) receives the program and its reports
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$here/plans/gpt}"

"$here/setup.sh"
export PATH="$here/.venv/bin:$PATH" OMP_NUM_THREADS=1

autoplan plan "$here/examples/gpt.py" --hw dgx_a100_x8 --global-batch 16 --out "$folder" --force

printf '\n== The program, on CPU processes: the loss falls\n\n'
"$folder/launch/torchrun.sh" --steps 6 --device cpu --dtype float32  # most CPUs only emulate bf16, 30 times as slow

printf '\n== The same program beside one plain process: equal loss, gradients and parameters\n\n'
autoplan verify "$folder" --steps 2

printf '\nThe program: %s/train.py   The report: %s/report.html\n' "$folder" "$folder"
