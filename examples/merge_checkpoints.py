"""Train two small specialists of one ancestor, merge them in five ways, and see the results.

Command   python examples/merge_checkpoints.py
Time      about 1 minute on 2 CPU cores; nothing is downloaded
Result    a table of accuracy on both tasks: each specialist can do its own task and not the
          other's; averages keep all of one task and most of the other; sign election (ties,
          dare_ties) is worse, because each specialist had to unlearn the other's task

All checkpoints stay in the output folder. `train_masks.py` continues from here.
"""

from pathlib import Path

from common import remove_earlier
from two_tasks import make_specialists, options, show

from mergekit_lite import merge_models

MERGES = {
    "linear": {"weight": [0.5, 0.5]},
    "slerp": {"t": 0.5},
    "task_arithmetic": {"weight": [1.0, 1.0], "lambda_": 0.6},
    "ties": {"weight": [1.0, 1.0], "density": 0.9, "lambda_": 0.6},
    "dare_ties": {"weight": [1.0, 1.0], "density": 0.9, "lambda_": 0.6},
}


def merge_by_formulas(out: Path) -> dict[str, Path]:
    """Merge the specialists in five ways."""
    models, folders = (
        [out / "reverse", out / "upper"],
        {method: out / f"merged-{method}" for method in MERGES},
    )
    for method, folder in folders.items():
        remove_earlier(folder)
        base = {"linear": None, "slerp": out / "reverse"}.get(method, out / "ancestor")
        merge_models(models, method, base_model=base, out=folder, progress=False, **MERGES[method])
    return folders


if __name__ == "__main__":
    given = options(__doc__)
    show(make_specialists(given.out, given.smoke) | merge_by_formulas(given.out))
