#!/usr/bin/env bash
# A GPU for ten minutes: equivalence of every path on the device first, then the rows most wanted, written as it goes.
#
#   bash tests/gpu_day.sh [OUT]     # OUT: a folder, default $OUT or build/gpu_day
#
# Needs a checkout, Python 3.11 or newer with torch, transformers, peft, triton, pytest: nothing is installed, no virtual
# environment is made, nothing is downloaded. What is there when the time is up stays: each step has a log of its own,
# summary.txt a line a step, results/ the rows. MINUTES=9 says when no new step begins, PYTHON which interpreter;
# DEVICE=cpu rehearses it without a GPU (kernels are then interpreted). Exit status 0: every step was done and passed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-${OUT:-build/gpu_day}}
MINUTES=${MINUTES:-9}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
export PYTHONPATH="$PWD/src:$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MODEL_COMPONENTS_RESULTS="$OUT/results" # benchmark rows go here instead of tests/benchmarks/results
mkdir -p "$OUT/results"
: >"$OUT/summary.txt"
begun=$SECONDS status=0

step() { # name, seconds at most, command...
    local name=$1 most=$2 left=$((MINUTES * 60 - (SECONDS - begun))) from=$SECONDS rc
    shift 2
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

step machine 60 "$PYTHON" -m tests.support.machine "$DEVICE"

# What is judged against float64 runs on the device, eager and fused; a row is measured where its operation passed.
judged() { # name, tests...
    local name=$1
    shift
    step "equivalence-$name" 150 "$PYTHON" -m pytest --maxfail=20 -p no:cacheprovider --device "$DEVICE" "$@"
}
row() { # the equivalence it stands on, seconds at most, benchmark
    if grep -q "^equivalence-$1: rc 0" "$OUT/summary.txt"; then
        step "bench-$3" "$2" "$PYTHON" -m tests.benchmarks.run "$3" --device "$DEVICE" --rows-only --gated
    else
        echo "bench-$3: not begun, $(grep "^equivalence-$1" "$OUT/summary.txt" | cut -c 1-60)" | tee -a "$OUT/summary.txt"
        status=1
    fi
}
judged lora tests/heads/lora/test_functional.py -k "not finite and not compile"
judged kronecker tests/kronecker/test_functional.py -k "not finite and not compile"
judged masks tests/mergekit_lite/masks/test_functional.py tests/mergekit_lite/masks/test_losses.py \
    tests/mergekit_lite/masks/test_triton.py -k "not finite and not compile"
judged pairwise tests/heads/pairwise/test_functional.py
judged thinker tests/thinker/test_model.py -k "projected_once or plan or rows_that_stop"
row lora 90 lora_linear
row kronecker 90 kron_linear
row masks 90 masked_linear
row pairwise 60 pairwise_step
row lora 60 lora_step
row masks 60 masked_kl
row thinker 60 thinker_step
row kronecker 60 kron_model
exit $status
