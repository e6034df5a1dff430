#!/usr/bin/env bash
# Make .venv beside this file ready to run autoplan; with --dev, ready to test it too. Safe to run again.
#
#   PYTHON=/path/to/python ./setup.sh     another interpreter than python3; a torch it already has is used
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

torch_version=2.13.0
extra=""
[[ "${1:-}" == "--dev" ]] && extra="[dev]"

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python; do
        if [[ -n "$candidate" ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found" "install one, or name it: PYTHON=/path/to/python $0"
}

# With the pip of the environment, or, where Python comes without ensurepip, that of the interpreter outside. It would
# compile one module after another; `compile_all` does that on all cores.
install() {
    if .venv/bin/python -c 'import pip' 2>/dev/null; then
        .venv/bin/python -m pip install --no-compile --quiet --disable-pip-version-check "$@"
    else
        "$python" -m pip --quiet --disable-pip-version-check --python .venv/bin/python install --no-compile "$@"
    fi
}

packages() {
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Packages hold templates that are no Python, too.
compile_all() {
    .venv/bin/python -m compileall -qq -j 0 "$(packages)" || true
}

has_torch() {
    "$1" -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
}

# Let the environment see a torch that the interpreter outside already has.
borrow_torch() {
    local outside
    outside="$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)')"
    printf '%s\n' "$outside" > "$(packages)/borrowed_torch.pth"
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1
}

# Whether pip would install a CUDA build of torch: asked of its metadata, before gigabytes are downloaded.
would_install_cuda() {
    install --dry-run --ignore-installed --no-deps --report - "torch==$torch_version" | .venv/bin/python -c '
import json, sys
(wheel,) = json.load(sys.stdin)["install"]
needs = " ".join(need for need in wheel["metadata"].get("requires_dist", []) if "extra ==" not in need).lower()
sys.exit(not any(word in needs for word in ("nvidia", "cuda", "triton")))'
}

install_torch() {
    if ! has_gpu && would_install_cuda; then
        fail "this machine has no GPU, and the configured package index offers only CUDA builds of torch $torch_version" \
            "install a CPU build: choose Linux, Pip, Python, CPU under \"Start locally\" on pytorch.org," \
            "run the command shown there, and then run this again; it uses the torch that python3 has"
    fi
    install "torch==$torch_version"
    has_torch .venv/bin/python || fail "torch was installed but cannot be imported:" "$(.venv/bin/python -c 'import torch' 2>&1)"
}

python="$(find_python)"
stamp=".venv/ready$extra"
wanted="$(cat setup.sh pyproject.toml | cksum)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi

[[ -L .venv ]] && fail ".venv is a link to $(readlink .venv), whose environment is not this checkout's" "remove the link: rm .venv"
echo "setup: preparing .venv (once; a few minutes)" >&2
if [[ ! -x .venv/bin/python ]]; then
    "$python" -m venv .venv >/dev/null 2>&1 || "$python" -m venv --clear --without-pip .venv
fi
if ! has_torch .venv/bin/python; then
    if has_torch "$python"; then
        borrow_torch
    else
        install_torch
    fi
fi
install "setuptools>=77" wheel
install --no-build-isolation --editable ".$extra"
# What the interpreter of a borrowed torch has counts as installed, but its commands are not in this environment.
if [[ -n "$extra" && ! -x .venv/bin/ruff ]]; then
    install --ignore-installed --no-deps ruff mypy
fi
compile_all
# In the folder above, Python would take the checkout itself for the package; one that is on the path goes first.
printf '%s\n' "$PWD" > "$(packages)/autoplan_checkout.pth"
printf '%s\n' "$wanted" > "$stamp"
