"""Every recipe of recipes.yaml, run by us and by mergekit: what came out, as a few numbers, and
what may differ.

``python -m tests.mergekit_lite.peers.dialect`` (with the bench extra) runs mergekit anew and writes
golden.json.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.torch import load_file

from mergekit_lite import load_recipe, merge_models

from .models import build

HERE = Path(__file__).parent
RECIPES: dict[str, str] = yaml.safe_load((HERE / "recipes.yaml").read_text())
GOLDEN = HERE / "golden.json"
TOLERANCE = 2e-4  # of a projection; the largest that float32 noise makes is 1.4e-5

# Recipes that both run, to different results.
DIFFERENT = {
    "bfloat16 models: we compute in float32 and round once; mergekit computes in bfloat16, "
    "except for linear and slerp, where the last bit may differ": (
        "dtype_bfloat16 dtype_only_out dtype_torch_prefix dtype_float32_out_bfloat16 bf16_linear "
        "bf16_task_arithmetic bf16_ties bf16_nuslerp bf16_multislerp bf16_karcher bf16_model_stock "
        "bf16_sce bf16_arcee_fusion bf16_nearswap"
    ),
    "embedding rows without a token stay as padding; mergekit drops them": (
        "tok_rows_more_than_tokens"
    ),
    "exactly opposite models: we interpolate linearly; mergekit divides one rounding error by another": (
        "nuslerp_antiparallel karcher_antipodal"
    ),
    "the last norm and the head, if slices have different numbers of sources: we merge all sources of "
    "the last slice; mergekit takes one of them": ("slices_uneven_source_counts"),
    "a token that a stacked model lacks: we take its row from a model that has it; mergekit leaves "
    "zeros": ("tok_passthrough_stack_union"),
    "tied and untied models together: we mark the output as untied; mergekit keeps the "
    "base's flag": ("tok_tied_union tied_base_untied_expert"),
    "names of LLaVA's tensors: we keep the names in the checkpoint; mergekit writes the newer names of "
    "transformers": ("arch_llava_linear arch_llava_slerp arch_llava_gradient"),
    "stacks of an architecture that mergekit has no definition of: our config has the right number of "
    "layers, and the last norm comes from the last slice": "arch_opt_stack",
    "random draws (dare, della): the generators differ": (
        "r_dare_ties r_dare_linear_rescale_off r_della r_della_linear r_p_dare_ties_sparse_template "
        "r_p_dare_ties_base_has_weight r_p_dare_ties_dtype_among_parameters "
        "r_p_dare_ties_base_first r_p_dare_ties_foreign_parameters r_p_dare_ties_weight_gradients "
        "r_p_della_per_model r_p_della_without_epsilon r_p_della_union_template "
        "r_p_della_linear_weight_filters r_p_della_linear_in_the_default_module"
    ),
}
# Recipes that mergekit runs and we refuse: they say something that is likely not meant.
REFUSED = {
    "values out of range: density 0 or above 1, t above 1, a boolean as a weight": (
        "ties_density_0 weights_out_of_range slerp_t_out_of_range weight_as_boolean "
        "gradient_of_booleans_and_numbers x_breadcrumbs_negative_density r_dare_density_zero "
        "della_density_zero"
    ),
    "weights that sum to 0 with normalize: mergekit writes NaN": "linear_zero_weight_sum",
    "a duplicate key in a mapping: mergekit takes the last value": "duplicate_keys",
    "a parameter next to `model:` instead of under `parameters:`, or the name `lambda_`: mergekit "
    "ignores it": ("unknown_keys_in_entries lambda_underscore_name"),
    "the same model with two spellings of its path": "same_model_two_spellings",
    "a slice without layers": "slice_empty_range",
    "a chat template that is neither a known name nor a template nor a file: mergekit writes no "
    "tokenizer at all": "chat_invalid",
}
# Recipes that mergekit refuses, or breaks on, and we run.
EXTRA = {
    "slices whose base is not among their sources": "x_ties_slices_base_not_a_source",
    "a null parameter, which counts as absent": "x_weight_null",
    "models given as plain strings; two spellings of one path; filters that are numbers; a "
    "single module with any name": (
        "x_models_as_strings x_base_spelled_otherwise x_filter_number x_modules_wrong_name"
    ),
    "new tokens, and tokens beyond a model's rows": (
        "tok_model_token_new tok_zero x_tok_new_without_source x_tok_new_union_without_source "
        "tok_path_of_padded_tokenizer"
    ),
    "a BERT without a pooler; a stack of Qwen2, whose config lists every layer": (
        "arch_bert_linear_gradient arch_qwen_stack"
    ),
    "an unknown parameter that is a mapping": "x_unknown_parameter_mapping",
    "several models whose directions cancel": "x_multislerp_antipodal_three",
}


def names(groups: dict[str, str]) -> set[str]:
    """All recipes of some groups."""
    return {name for listed in groups.values() for name in listed.split()}


def signature(folder: Path) -> dict[str, Any]:
    """A merged checkpoint as a few numbers: projections on fixed random directions, and a hash of
    names and shapes."""
    totals, said = np.zeros(4), 0
    state = {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }
    for name in sorted(state):
        said = zlib.crc32(f"{name} {list(state[name].shape)}".encode(), said)
        values = state[name].double().numpy().ravel()
        directions = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
            (4, values.size)
        )
        with np.errstate(invalid="ignore"):  # mergekit writes NaN for some recipes
            totals += directions @ values
    config = json.loads((folder / "config.json").read_text())
    keys = ("vocab_size", "num_hidden_layers", "n_layer", "tie_word_embeddings")
    return {
        "projections": [round(float(x), 6) for x in totals],
        "shapes": said,
        "config": {key: config[key] for key in keys if key in config},
    }


def ours(text: str, out: Path) -> list[str]:
    """Run a recipe by our code; its notes."""
    return merge_models(load_recipe(text), out=out, progress=False).notes


def mergekits(text: str, out: Path) -> list[str]:
    """Run a recipe by mergekit."""
    import torch
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    options = MergeOptions(
        quiet=True, write_model_card=False, lora_merge_cache=str(out.parent / "lora")
    )
    run_merge(
        MergeConfiguration.model_validate(yaml.safe_load(text)),
        str(out),
        options,
        config_source=text,
    )
    return []


def outcomes(
    run: Callable[[str, Path], list[str]],
    root: Path,
    tensors: dict[str, dict[str, np.ndarray]] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each recipe's name, and what came out or the class of the error; ``tensors`` takes the merged
    values."""
    with chdir(root), tempfile.TemporaryDirectory() as scratch:
        for name, text in RECIPES.items():
            out = Path(scratch) / name
            try:
                notes = run(text, out)
            except Exception as error:  # mergekit raises whatever its parts raise
                yield name, {"refused": type(error).__name__}
                continue
            if tensors is not None:
                loaded = [load_file(path) for path in out.glob("*.safetensors")]
                tensors[name] = {
                    key: value.double().numpy() for state in loaded for key, value in state.items()
                }
            yield name, signature(out) | {"notes": notes}
            shutil.rmtree(out)


def same(left: dict[str, Any], right: dict[str, Any], name: str = "") -> bool:
    """Whether two outcomes are one checkpoint, up to float32 noise.

    Without a base mergekit takes the config of a model that Python's hash seed draws, and with it
    the tie flag.
    """
    if name and "base_model" not in RECIPES[name]:
        left, right = (
            o | {"config": {**o.get("config", {}), "tie_word_embeddings": None}}
            for o in (left, right)
        )
    if (
        "refused" in left
        or "refused" in right
        or left["shapes"] != right["shapes"]
        or left["config"] != right["config"]
    ):
        return False
    return bool(
        np.allclose(left["projections"], right["projections"], atol=TOLERANCE, equal_nan=True)
    )


def verdict(name: str, we: dict[str, Any], they: dict[str, Any]) -> str:
    """One of the table's rows, or what is wrong."""
    if "refused" in we and "refused" in they:
        return "refused by both"
    if "refused" in we:
        return (
            "ours refuses"
            if name in names(REFUSED)
            else f"{name}: we refuse it, and it is not listed under REFUSED"
        )
    if "refused" in they:
        return (
            "mergekit refuses"
            if name in names(EXTRA)
            else f"{name}: mergekit alone refuses it, and EXTRA lacks it"
        )
    if name in names(DIFFERENT):
        return (
            "different"
            if not same(we, they, name) or name.startswith(("r_", "dtype"))
            else f"{name}: is the same now"
        )
    if not same(we, they, name):
        return f"{name}: differs, and is not listed under DIFFERENT"
    return "equal, with a note" if any("no effect" in note for note in we["notes"]) else "equal"


LISTS = {
    "Deliberately different": DIFFERENT,
    "Refused only by mergekit_lite": REFUSED,
    "Refused only by mergekit": EXTRA,
}
ROWS = {
    "equal": "the same tensors",
    "equal, with a note": "the same tensors, and a note on keys without effect",
    "refused by both": "refused by both",
    "different": "deliberately different",
    "ours refuses": "refused only by mergekit_lite",
    "mergekit refuses": "refused only by mergekit",
}


def table(verdicts: dict[str, str]) -> str:
    """The guide's table of how many recipes come out how, and the reasons where they differ."""
    counts = {row: sum(v == row for v in verdicts.values()) for row in ROWS}
    lines = [f"| {len(verdicts)} recipes | |", "|---|---|"]
    lines += [f"| {counts[row]} | {text} |" for row, text in ROWS.items()]
    for title, groups in (
        ("Deliberately different (in parentheses, the number of recipes)", DIFFERENT),
        ("Refused only by mergekit_lite (number of recipes)", REFUSED),
        ("Refused only by mergekit (number of recipes)", EXTRA),
    ):
        lines += ["", f"{title}:", ""]
        lines += [f"- {reason} ({len(listed.split())})" for reason, listed in groups.items()]
    return "\n".join(lines)


def main() -> None:
    """Run mergekit over all recipes and write golden.json."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        golden = dict(outcomes(mergekits, Path(folder)))
    GOLDEN.write_text(
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in golden.items()) + "\n}\n"
    )
    print(sum("refused" not in v for v in golden.values()), "of", len(golden), "ran")


if __name__ == "__main__":
    main()
