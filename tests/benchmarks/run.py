"""The runner: equivalence first, then every benchmark, then the pages made from the rows. ``make
bench``."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.benchmarks import (
    far_apart,
    far_apart_table,
    field_trial,
    fused_paths,
    imports,
    judge_command,
    kron_linear,
    kron_model,
    kron_starts,
    kron_training,
    lora_judges,
    lora_linear,
    lora_loss,
    lora_recipes,
    lora_step,
    lora_tune,
    mask_depth,
    mask_instructions,
    mask_step,
    masked_kl,
    masked_linear,
    merging,
    pairwise_away,
    pairwise_encoders,
    pairwise_step,
    pairwise_trial,
    prune_memory,
    prune_model,
    prune_training,
    shrink_example,
    smaller_study,
    thinker_ablation,
    thinker_accuracy,
    thinker_lengths,
    thinker_puzzles,
    thinker_questions,
    thinker_step,
)
from tests.benchmarks.page import write_page
from tests.benchmarks.results import write_memory_account, write_merge_table

MASKS, KRONECKER, THINKER = "tests/mergekit_lite/masks", "tests/kronecker", "tests/thinker"
LORA = "tests/heads/lora"
PAIRWISE = "tests/heads/pairwise"
GATES = {
    "fused_paths": [
        f"{MASKS}/test_functional.py",
        f"{KRONECKER}/test_triton.py",
        f"{LORA}/test_functional.py",
        f"{PAIRWISE}/test_functional.py",
    ],
    "merging": ["tests/mergekit_lite/test_methods.py"],
    "masked_linear": [f"{MASKS}/test_functional.py"],
    "masked_kl": [f"{MASKS}/test_losses.py"],
    "mask_step": [f"{MASKS}/test_training.py", "-k", "dense_one"],
    "mask_depth": [f"{MASKS}/test_merger.py", "-k", "baked"],
    "mask_instructions": [f"{MASKS}/test_low_rank.py"],
    "far_apart": ["tests/mergekit_lite/test_learning.py"],
    "kron_linear": [f"{KRONECKER}/test_functional.py"],
    "kron_model": [f"{KRONECKER}/test_convert.py", "-k", "all_terms or golden"],
    "kron_starts": [f"{KRONECKER}/test_init.py"],
    "kron_training": [f"{KRONECKER}/test_training.py", "-k", "freezing or layers_come or resumed"],
    "prune_memory": [f"{KRONECKER}/test_pruning.py", "-k", "half or mapped or cache"],
    "prune_model": [f"{KRONECKER}/test_pruning.py"],
    "prune_training": [f"{KRONECKER}/test_training.py"],
    "shrink_example": [f"{KRONECKER}/test_pruning.py"],
    "smaller_study": [f"{KRONECKER}/test_convert.py", "-k", "all_terms or all_ranks or low_rank"],
    "thinker_step": [f"{THINKER}/test_model.py"],
    "thinker_accuracy": [f"{THINKER}/test_tasks.py", f"{THINKER}/test_curriculum.py"],
    "thinker_lengths": [f"{THINKER}/test_tasks.py", f"{THINKER}/test_losses.py"],
    "thinker_ablation": [f"{THINKER}/test_training.py", "-k", "learns_to_copy"],
    "thinker_puzzles": [
        f"{THINKER}/test_sudoku.py",
        f"{THINKER}/test_training.py",
        "-k",
        "sudoku or segments",
    ],
    "thinker_questions": [f"{THINKER}/test_flow.py", f"{THINKER}/test_training.py", "-k", "plan"],
    "lora_linear": [f"{LORA}/test_functional.py"],
    "lora_loss": [f"{LORA}/test_losses.py"],
    "lora_step": [f"{LORA}/test_accelerate.py", "-k", "output_and_gradients"],
    "lora_judges": [f"{LORA}/test_judging.py"],
    "lora_recipes": [f"{LORA}/test_tuning.py"],
    "lora_tune": [f"{LORA}/test_tune.py"],
    "imports": ["tests/test_imports.py"],
    "field_trial": ["tests/test_examples.py", "-k", "field_trial"],
    "pairwise_step": [f"{PAIRWISE}/test_packing.py", f"{PAIRWISE}/test_functional.py"],
    "pairwise_trial": [
        f"{PAIRWISE}/test_links.py",
        f"{PAIRWISE}/test_training.py",
        "-k",
        "swapping or learns",
    ],
    "judge_command": [f"{PAIRWISE}/test_run.py"],
    "pairwise_away": [f"{PAIRWISE}/test_uncertainty.py"],
    "pairwise_encoders": [f"{PAIRWISE}/test_training.py", "-k", "learns or drops"],
}
SCRIPTS = {
    "fused_paths": fused_paths.main,
    "merging": merging.main,
    "masked_linear": masked_linear.main,
    "masked_kl": masked_kl.main,
    "mask_step": mask_step.main,
    "mask_depth": mask_depth.main,
    "mask_instructions": mask_instructions.main,
    "far_apart": far_apart.main,
    "kron_linear": kron_linear.main,
    "kron_model": kron_model.main,
    "kron_starts": kron_starts.main,
    "kron_training": kron_training.main,
    "prune_memory": prune_memory.main,
    "prune_model": prune_model.main,
    "prune_training": prune_training.main,
    "shrink_example": shrink_example.main,
    "smaller_study": smaller_study.main,
    "thinker_step": thinker_step.main,
    "thinker_accuracy": thinker_accuracy.main,
    "thinker_lengths": thinker_lengths.main,
    "thinker_ablation": thinker_ablation.main,
    "thinker_puzzles": thinker_puzzles.main,
    "thinker_questions": thinker_questions.main,
    "lora_linear": lora_linear.main,
    "lora_loss": lora_loss.main,
    "lora_step": lora_step.main,
    "lora_judges": lora_judges.main,
    "lora_recipes": lora_recipes.main,
    "lora_tune": lora_tune.main,
    "pairwise_step": pairwise_step.main,
    "pairwise_trial": pairwise_trial.main,
    "pairwise_away": pairwise_away.main,
    "pairwise_encoders": pairwise_encoders.main,
    "judge_command": judge_command.main,
    "imports": imports.main,
    "field_trial": field_trial.main,
}


def main() -> None:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCRIPTS)} (default: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--page-only", action="store_true", help="only write what is made from the rows"
    )
    parser.add_argument(
        "--rows-only", action="store_true", help="write rows and no page, for tests/gpu_day.sh"
    )
    parser.add_argument(
        "--gated", action="store_true", help="the caller has just run the equivalence tests"
    )
    options, rest = parser.parse_known_args()
    for name in [] if options.page_only else options.names or SCRIPTS:
        gate = [sys.executable, "-m", "pytest", "-q", "--device", options.device, *GATES[name]]
        if not options.gated and subprocess.run(gate, check=False).returncode:
            sys.exit(f"{name}: its equivalence tests fail, so it is not timed")
        SCRIPTS[name](["--device", options.device, *rest])
    if options.rows_only:
        return
    write_page()
    write_memory_account()
    tabled = (
        field_trial,
        mask_instructions,
        kron_starts,
        kron_training,
        prune_memory,
        prune_model,
        prune_training,
        shrink_example,
        smaller_study,
        thinker_accuracy,
        thinker_ablation,
        thinker_step,
    )
    for script in (
        *tabled,
        lora_linear,
        lora_loss,
        lora_step,
        lora_judges,
        lora_recipes,
        lora_tune,
        pairwise_step,
        pairwise_trial,
        pairwise_away,
        pairwise_encoders,
    ):
        script.write_table()
    far_apart_table.write_tables()
    judge_command.write_text()
    write_merge_table()


if __name__ == "__main__":
    main()
