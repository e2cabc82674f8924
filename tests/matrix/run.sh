#!/usr/bin/env bash
# Run the suite in three environments: lowest bounds, the pinned versions, the newest that the bounds admit.
# Rows are those named (lowest pinned newest); all by default. torch keeps its pinned version where the row's own has
# no CPU build: pip would take several GB of CUDA packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
status=0
for row in "${@:-lowest pinned newest}"; do for name in $row; do
    case $name in
        lowest) constraints=tests/matrix/lowest.txt ;;
        pinned) constraints=constraints.txt ;;
        newest) constraints=/dev/null ;;
        *) echo "matrix: $name is no row, needed lowest, pinned or newest" >&2; exit 2 ;;
    esac
    environment=build/matrix/$name
    test -x "$environment/bin/python" || "$PYTHON" -m venv "$environment"
    "$environment/bin/pip" install --quiet --constraint constraints.txt torch # the CPU build, before anything asks for another
    echo "matrix: $name keeps torch $("$environment/bin/python" -c 'import torch; print(torch.__version__)')"
    "$environment/bin/pip" install --quiet --constraint "$constraints" --editable '.[plot,test]'
    "$environment/bin/pip" list --format freeze | grep -iE '^(torch|transformers|peft|accelerate|huggingface|safetensors|numpy|tokenizers|triton)'
    OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest --numprocesses auto --dist worksteal || status=1
done; done
exit $status
