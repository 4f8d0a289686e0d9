#!/usr/bin/env bash
# Remake the golden values: tests/goldens/make.sh [SEED [ONLY]], or `make goldens SEED=n ONLY=olmo3`. ONLY is the beginning
# of models' names, "ropes", "variations", "beams" or "quantized"; nothing else is installed for it or written. Without it, all.
# They need torch, which has no wheels for every Python that jaxserve runs on, hence a Python 3.11 venv of their own.
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-0}
only=${2:-}
venv=.venv-goldens
export PYTHONPATH=tests/support:tests/goldens

find_python() {
    for candidate in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python; do
        # A pyenv shim is on the PATH even when its version is not selected: only running it tells.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "make goldens needs Python 3.11, for torch. Install it (for example: pyenv install 3.11) and try again." >&2
    return 1
}

transformers=$(grep '^transformers==' constraints.txt)
gptqmodel=gptqmodel-7.7.0
of_models=(torch==2.13.0 "$transformers" safetensors numpy)
of_formats=(auto-round==0.16.1 compressed-tensors==0.20.0 bitsandbytes==0.50.2 gguf==0.19.0 setuptools logbar pypcre threadpoolctl)

install() {
    local name installed
    [[ -x $venv/bin/python ]] || "$(find_python)" -m venv "$venv"
    installed=$("$venv/bin/python" -m pip list --format freeze | sed 's/+cpu$//')
    for name in "$@"; do
        [[ $name == *==* ]] || name="$name==.*"
        if ! grep -qx "$name" <<<"$installed"; then
            "$venv/bin/python" -m pip install --quiet "$@"
            return
        fi
    done
}

make_models() {
    install "${of_models[@]}"
    "$venv/bin/python" tests/goldens/make_goldens.py --seed "$seed" --only "$1"
}

make_variations() {
    install "${of_models[@]}"
    "$venv/bin/python" tests/goldens/make_variations.py
}

make_beams() {
    install "${of_models[@]}"
    "$venv/bin/python" tests/goldens/make_beams.py
}

make_quantized() {
    install "${of_models[@]}" "${of_formats[@]}"
    if [[ ! -d $venv/$gptqmodel ]]; then  # of which the source is enough: see make_quantized.py
        "$venv/bin/python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: -d "$venv" \
            "${gptqmodel/-/==}"
        tar -xzf "$venv/$gptqmodel.tar.gz" -C "$venv"
    fi
    "$venv/bin/python" tests/goldens/make_quantized.py --seed "$seed" --gptqmodel "$venv/$gptqmodel"
}

case $only in
    quantized) make_quantized ;;
    variations) make_variations ;;
    beams) make_beams ;;
    "")
        make_models ""
        make_variations
        make_beams
        make_quantized
        ;;
    *) make_models "$only" ;;
esac
