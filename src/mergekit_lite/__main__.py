"""The command line.

``mergekit-lite merge RECIPE OUT``, ``plan RECIPE``, ``extract-lora``, ``masks CONFIG OUT``.

``torchrun --nproc_per_node=N -m mergekit_lite merge RECIPE OUT`` divides the tensors over N
processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from model_components import __version__
from model_components._commands import GOES_ON, run_command
from model_components._folders import is_begun

from ._torch import torch
from .adapters import extract_lora
from .functional import merge_models, parse_size
from .planning import make_plan
from .recipe import load_recipe


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="mergekit-lite", description="Merge checkpoints by a YAML recipe."
    )
    top.add_argument("--version", action="version", version=f"mergekit-lite {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="check the recipe, then write the merged checkpoint")
    merge.add_argument("recipe", help="YAML file")
    merge.add_argument("out", help="folder to write; must not exist or be empty")
    merge.add_argument(
        "--calibration",
        nargs="+",
        metavar="FILE",
        help="text or JSON, one of each model's data in order, for regmean and regmean++",
    )
    merge.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    # as mergekit's users write it
    merge.add_argument("--cuda", action="store_true", help=argparse.SUPPRESS)
    merge.add_argument(
        "--impl", default="auto", help="auto, fused (compiled kernels) or eager (torch functions)"
    )
    merge.add_argument("--seed", type=int, default=0, help="seed of methods that draw (default: 0)")
    merge.add_argument(
        "--threads", type=int, help="blocks in work at once (default: one a core, at most 8)"
    )
    merge.add_argument("--no-progress", action="store_true", help="no progress bar")
    merge.add_argument(
        "--no-resume",
        action="store_true",
        help="start over instead of finishing an interrupted run",
    )
    merge.add_argument(
        "--trust-remote-code", action="store_true", help="copy a model's own Python files too"
    )
    plan = commands.add_parser(
        "plan", help="check the recipe and print what a merge would read, write and hold"
    )
    plan.add_argument("recipe", help="YAML file")
    extract = commands.add_parser(
        "extract-lora", help="write the LoRA adapter nearest to what tuning changed"
    )
    extract.add_argument("model", help="tuned model")
    extract.add_argument("base", help="what it was tuned from")
    extract.add_argument("out", help="folder to write; must not exist or be empty")
    extract.add_argument(
        "--rank", type=int, default=16, help="largest rank of a module (default: 16)"
    )
    extract.add_argument(
        "--energy", type=float, default=1.0, help="share of a change's squared norm that is enough"
    )
    extract.add_argument("--dtype", help="of the factors (default: the model's)")
    extract.add_argument(
        "--save-others", action="store_true", help="save changed embeddings, heads and norms whole"
    )
    extract.add_argument("--no-progress", action="store_true", help="no progress bar")
    masks = commands.add_parser(
        "masks", help="train masks as a YAML file says, bake and compare them"
    )
    masks.add_argument("config", help="YAML file: components, data, masks, kl, training, compare")
    masks.add_argument("out", help="folder to write; must not exist or be empty")
    masks.add_argument("--no-progress", action="store_true", help="no progress bar")
    for command in (merge, plan, extract):
        command.add_argument(
            "--allow-pickle", choices=["weights_only"], help="admit pickled .bin checkpoints"
        )
    for command in (merge, plan):
        command.add_argument(
            "--max-shard-size", default="5GB", help="largest weight file (default: 5GB)"
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        torch.distributed.init_process_group("gloo")
    try:
        return run_command("mergekit-lite", lambda: _run(options), kept=lambda: _kept(options))
    finally:
        if several:
            torch.distributed.destroy_process_group()


def _kept(options: argparse.Namespace) -> str:
    """Tell how to go on after a stop."""
    out = Path(getattr(options, "out", "."))
    begun = is_begun(out) or any(out.with_name(f"{out.name}.training").glob("checkpoint-*"))
    return GOES_ON if begun else ""


def _run(options: argparse.Namespace) -> None:
    if options.command == "extract-lora":
        print(
            extract_lora(
                options.model,
                options.base,
                options.out,
                rank=options.rank,
                energy=options.energy,
                dtype=options.dtype,
                save_others=options.save_others,
                progress=not options.no_progress,
                allow_pickle=options.allow_pickle,
            )
        )
    elif options.command == "masks":
        # imports transformers, which a recipe's merge does not need
        from .masks.run import run_masks
        from .masks.run_config import MaskRun

        print(
            run_masks(
                MaskRun.from_yaml(options.config), options.out, progress=not options.no_progress
            )
        )
    elif options.command == "plan":
        limit = parse_size(options.max_shard_size)
        print(
            make_plan(
                load_recipe(options.recipe), max_shard_size=limit, allow_pickle=options.allow_pickle
            )
        )
    else:
        if options.cuda:
            raise ValueError("merge: --cuda is --device cuda here")
        report = merge_models(
            load_recipe(options.recipe),
            out=options.out,
            device=options.device,
            impl=options.impl,
            max_shard_size=options.max_shard_size,
            seed=options.seed,
            threads=options.threads,
            progress=not options.no_progress,
            resume=not options.no_resume,
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
            calibration=options.calibration,
        )
        if int(os.environ.get("RANK", "0")) == 0:
            print(report)


if __name__ == "__main__":
    sys.exit(main())
