#!/usr/bin/env bash
# A GPU for ten minutes: equivalence of every path on the device, then `model-components kernels`, then rows.
#
#   bash tests/gpu_day.sh [OUT]     # OUT: a folder, default $OUT or build/gpu_day
#
# Needs a checkout, Python 3.11 or newer with torch, transformers, peft, triton, pytest, pytest-xdist: nothing is
# installed or downloaded, no virtual environment is made. What is there when the time is up stays: each step has a log
# of its own, summary.txt a line a step, results/ the rows. MINUTES=9 says when no new step begins, PYTHON which
# interpreter, ONLY="equivalence rows" which steps; DEVICE=cpu rehearses it without a GPU (kernels are then
# interpreted). Exit status 0: all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-${OUT:-build/gpu_day}}
MINUTES=${MINUTES:-9}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
export PYTHONPATH="$PWD/src:$PWD:$OUT/site" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MODEL_COMPONENTS_RESULTS="$OUT/results" # rows go here instead of tests/benchmarks/results
mkdir -p "$OUT/results"
: >"$OUT/summary.txt"
begun=$SECONDS status=0

step() { # name, seconds at most, command...
    local name=$1 most=$2 left=$((MINUTES * 60 - (SECONDS - begun))) from=$SECONDS rc
    shift 2
    [[ -z "${ONLY:-}" || " metadata $ONLY " == *" $name "* ]] || return
    if [ "$left" -lt 15 ]; then
        echo "$name: not begun, the time is up" | tee -a "$OUT/summary.txt"
        status=1
        return
    fi
    timeout $((most < left ? most : left)) "$@" >"$OUT/$name.log" 2>&1
    rc=$?
    [ $rc -eq 0 ] || status=1
    echo "$name: rc $rc, $((SECONDS - from)) s: $(tail -n 1 "$OUT/$name.log" | cut -c 1-160)" | tee -a "$OUT/summary.txt"
}

step metadata 60 "$PYTHON" -m tests.support.metadata "$OUT/site"
step machine 60 "$PYTHON" -m tests.support.machine "$DEVICE"
# what is judged against float64 runs on the device, eager and fused
step equivalence 150 "$PYTHON" -m pytest -n 8 --maxfail=40 -p no:cacheprovider --device "$DEVICE" \
    tests/heads/lora/test_functional.py tests/heads/lora/test_losses.py tests/heads/pairwise/test_functional.py tests/kronecker/test_functional.py \
    tests/kronecker/test_triton.py tests/mergekit_lite/masks/test_functional.py tests/mergekit_lite/masks/test_losses.py \
    tests/mergekit_lite/masks/test_triton.py tests/thinker/test_model.py -k "not finite and not compile and not two_processes"
# these train, or run blocks, on the GPU if there is one
step learning 150 "$PYTHON" -m pytest -n 8 -p no:cacheprovider --device "$DEVICE" \
    tests/mergekit_lite/test_learning.py tests/mergekit_lite/layerwise tests/heads/lora/test_tune.py
step battery 150 "$PYTHON" -m pytest -n 8 -p no:cacheprovider --device "$DEVICE" tests/test_modules.py
step kernels 90 "$PYTHON" -m tests.support.machine kernels "$DEVICE"
if grep -q "^equivalence: rc 0" "$OUT/summary.txt"; then
    step rows 300 "$PYTHON" -m tests.benchmarks.run fused_paths --device "$DEVICE" --rows-only --gated
    step loss 150 "$PYTHON" -m tests.benchmarks.run lora_loss --device "$DEVICE" --rows-only --gated
fi
exit $status
