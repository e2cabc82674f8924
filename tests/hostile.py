"""Inputs that somebody broke: each ends in an error of ours, or changes nothing (`make hostile`).

Every loader, command and folder has a whole input, whose files are broken one at a time: cut,
emptied, filled with noise, replaced by folders and links, edited by hand. A case runs in a process
of its own. It passes if code of ours raises a ValueError, OSError or RuntimeError, or if the result is
that of the whole input, within five seconds more than the whole input takes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import importlib
import json
import linecache
import math
import os
import pickle
import pkgutil
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.support.models import save, save_tokenizer, tiny

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 5  # beyond what the whole input takes
WORDS = ["<unk>", *(f"w{i}" for i in range(95))]
IDS = torch.arange(3, 19).view(2, 8)
THINK = ["--iterations", "4", "--length", "3", "--samples", "8", "--no-progress"]
BOMB = "a: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))
DEEP = "[" * 100_000
VALUES = (None, [], {}, -1, 10**30, "x", math.nan)
"""What a value of a JSON object is replaced by."""


@dataclass(frozen=True)
class Target:
    """An input that is read.

    Args:
        name: What to call it.
        make: Writes the whole input into a folder, which is the current one.
        use: Reads it there, and returns what can be compared.
        files: The files that are broken.
    """

    name: str
    make: Callable[[], object]
    use: Callable[[], object]
    files: tuple[str, ...]


def run_command(*words: str) -> object:
    """Run a command of ours, but for its catching of errors."""
    from model_components._cli import _command_of, _parsed, _shared_flags

    names = commands()
    name, rest = _command_of(list(words), "model-components", names)
    shared, rest = _shared_flags(rest)
    return _parsed(pkgutil.resolve_name(names[name]), name, shared.config, rest)()


def commands() -> dict[str, str]:
    """Return the names and functions of all commands."""
    import importlib.metadata

    found = importlib.metadata.entry_points(group="model_components.commands")
    return {entry.name: entry.value for entry in found}


def digest(folder: str | Path) -> str:
    """Return a hash of all weights in a folder."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def rounded(tensor: torch.Tensor) -> list[float]:
    """Return numbers that can be compared."""
    return [round(float(value), 5) for value in tensor.detach().float().flatten()[:64]]


def make_models() -> None:
    """Write two language models with tokenizers, a text and examples."""
    for k in range(2):
        save(tiny("llama", k), Path(f"model{k}"))
        save_tokenizer(Path(f"model{k}"), WORDS)
    rng = random.Random(0)
    Path("text.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(400)))
    for k in range(2):
        rows = [{"prompt": f"w{n} ", "completion": f"w{n + k} w3"} for n in range(9)]
        Path(f"task{k}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def merged(**options: Any) -> Callable[[], str]:
    """Return a merge of the two models, and a hash of its weights."""

    def merge() -> str:
        from mergekit_lite import merge_models

        merge_models(["model0", "model1"], out="out", progress=False, **options)
        return digest("out")

    return merge


def merged_by_recipe() -> str:
    """Merge by a recipe."""
    from mergekit_lite import load_recipe, merge_models

    merge_models(load_recipe("recipe.yml"), out="out", progress=False)
    return digest("out")


def make_recipe() -> None:
    """Write a recipe of two models."""
    make_models()
    recipe = {"merge_method": "linear", "models": [], "dtype": "float32"}
    for k in range(2):
        recipe["models"].append({"model": f"model{k}", "parameters": {"weight": 0.5}})
    Path("recipe.yml").write_text(yaml.safe_dump(recipe))


def stopped(work: Callable[[], object], path: str, count: int) -> None:
    """Run work until so many files have got a name with ``path`` in it, then stop it as a kill does."""
    pid = os.fork()
    if not pid:
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event == "os.rename" and path in str(arguments[1]):
                seen += 1
                if seen > count:
                    os._exit(0)

        sys.addaudithook(hook)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            work()
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"hostile: {path} was not reached")


REGMEAN = {
    "method": "regmean",
    "calibration": [[{"input_ids": list(range(3, 20))}] * 2] * 2,
}


def make_stopped_regmean() -> None:
    """Leave a merge by data after its second block."""
    make_models()
    stopped(merged(**REGMEAN), "part-", 2)


def make_stopped_merge() -> None:
    """Leave a merge after its first weight file."""
    make_models()
    stopped(merged(weight=[0.5, 0.5], max_shard_size=8000), "progress.json", 2)


def make_adapter() -> None:
    """Write a base and an adapter by peft."""
    from peft import LoraConfig, get_peft_model

    make_models()
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"layers.1.*q_proj": 4})
    model = get_peft_model(tiny("llama", 0), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.peft_config["default"].base_model_name_or_path = "model0"
    model.save_pretrained("adapter")


def use_adapter() -> list[float]:
    """Load the adapter and run it."""
    from heads.lora import load_lora

    model = load_lora(tiny("llama", 0), "adapter")
    return rounded(model(input_ids=IDS).logits)


def merge_adapter() -> str:
    """Merge a model with the adapter folded in."""
    from mergekit_lite import merge_models

    models = ["model0+adapter", "model1"]
    merge_models(models, "linear", weight=[0.5, 0.5], out="out", progress=False)
    return digest("out")


def make_compressed() -> None:
    """Write a compressed model."""
    from kronecker import KroneckerConfig, convert_, save_pretrained

    model = tiny("gpt2")
    convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"), progress=False)
    save_pretrained(model, "small")


def use_compressed() -> list[float]:
    """Load it and run it."""
    from kronecker import from_pretrained

    return rounded(from_pretrained("small")(IDS).logits)


def make_stopped_prune() -> None:
    """Leave a prune after its first fit."""
    make_models()
    stopped(prune, "fitted", 1)


def prune() -> str:
    """Prune a model."""
    flags = ["--calibration", "text.txt", "--tokens", "320", "--context", "16", "--no-progress"]
    run_command("prune", "model0", "out", *flags)
    return digest("out")


def make_masks() -> None:
    """Write masks over two models."""
    from mergekit_lite.masks import Merger

    make_models()
    torch.manual_seed(0)
    merger = Merger.from_pretrained(["model0", "model1"])
    with torch.no_grad():
        for mask in merger.masks().values():
            mask.uniform_(0, 1)
    merger.save_masks("masks.safetensors")


def use_masks() -> list[float]:
    """Load them and run the merge."""
    from mergekit_lite.masks import Merger

    merger = Merger.from_pretrained(["model0", "model1"], masks="masks.safetensors")
    return rounded(merger(input_ids=IDS).logits)


def make_learn() -> None:
    """Leave a run of learned masks after its first checkpoint."""
    make_models()
    values = {
        "components": ["model0", "model1"],
        "data": ["task0.jsonl", "task1.jsonl"],
        "masks": {"granularity": "output"},
        "training": {"max_steps": 4, "save_steps": 1, "save_total_limit": 3, "use_cpu": True},
        "compare": [],
        "held_out": 2,
    }
    Path("run.yml").write_text(yaml.safe_dump(values))
    stopped(learn, "checkpoint-3", 0)


def make_settings() -> None:
    """Write a file of settings alone."""
    make_learn()
    shutil.rmtree("out.training")


def learn() -> str:
    """Run it to its end."""
    run_command("learn", "run.yml", "out", "--no-progress")
    return digest("out")


def make_judge() -> None:
    """Write a judge."""
    from tests.heads.pairwise.support import model_of

    model_of("bert").save_pretrained("judge")
    rows = [{"prompt": "w1", "a": "w3", "b": "w2"}] * 3
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def use_judge() -> list:
    """Load it and judge."""
    from heads.pairwise import PairwiseModel

    judge = PairwiseModel.from_pretrained("judge")
    return rounded(judge.predict(["w1"], ["w2 w3"], ["w4"], progress=False).log_probabilities)


def use_rows() -> object:
    """Judge the rows of a file."""
    found = run_command("judge", "pairs", "judge", "rows.jsonl", "--no-progress")
    assert isinstance(found, Iterator)
    # a row that cannot be read has an error of its own, beside the others' verdicts
    return sorted({row["verdict"] for row in found if "error" not in row})


def make_thinker() -> None:
    """Train a thinker."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run_command("think", "train", "copy", "run", *THINK)


def use_thinker() -> list[float]:
    """Load it and run it."""
    from thinker import LatentThinker

    model = LatentThinker.from_pretrained("run/model")
    return rounded(model(torch.tensor([[1, 2, 0]])).logits)


def evaluate_thinker() -> str:
    """Evaluate a run's folder."""
    return str(run_command("think", "evaluate", "run", "--samples", "8"))


def make_stopped_training() -> None:
    """Leave a training before its last checkpoint is removed."""
    stopped(make_longer, "checkpoint-20", 0)


def make_longer() -> str:
    """Train a thinker for 20 steps."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run_command("think", "train", "copy", "run", *THINK, "--iterations", "20")
    return digest("run/model")


def read_examples() -> str:
    """Read examples of text."""
    from transformers import AutoTokenizer

    from mergekit_lite.masks import TextExamples

    tokenizer = AutoTokenizer.from_pretrained("model0")
    return str(TextExamples("task0.jsonl", tokenizer, max_length=16).examples)


def make_flags() -> None:
    """Write a file of flags."""
    make_models()
    Path("flags.yml").write_text("low-rank: 0.5\ncalibration: text.txt\ntokens: 320\ncontext: 16\n")


def convert() -> str:
    """Convert a model by a file of flags."""
    run_command("convert", "model0", "out", "--config", "flags.yml", "--no-progress")
    return digest("out")


def make_plan() -> None:
    """Write the table of a plan."""
    from thinker import FlowPlan

    Path("plan.md").write_text(str(FlowPlan.every_step(memory=False, static=False)))


def use_plan() -> str:
    """Read it."""
    run_command("think", "train", "copy", "run", *THINK, "--plan", "plan.md")
    return digest("run/model")


TARGETS = (
    Target(
        "merge",
        make_models,
        merged(weight=[0.5, 0.5]),
        ("model1/config.json", "model1/model.safetensors", "model0/tokenizer.json"),
    ),
    Target("recipe", make_recipe, merged_by_recipe, ("recipe.yml",)),
    Target(
        "merge, stopped",
        make_stopped_merge,
        merged(weight=[0.5, 0.5], max_shard_size=8000),
        (".out.partial/progress.json", ".out.partial/result/model-00001-of-*.safetensors"),
    ),
    Target(
        "merge by data",
        make_models,
        merged(**REGMEAN),
        ("model0/config.json", "model1/model.safetensors"),
    ),
    Target(
        "merge by data, stopped",
        make_stopped_regmean,
        merged(**REGMEAN),
        (
            ".out.blocks.partial/result/part-00000.safetensors",
            ".out.blocks.partial/result/states.safetensors",
        ),
    ),
    Target(
        "adapter, peft's",
        make_adapter,
        use_adapter,
        ("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ),
    Target(
        "adapter, merged",
        make_adapter,
        merge_adapter,
        ("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ),
    Target(
        "compressed model",
        make_compressed,
        use_compressed,
        ("small/kronecker.json", "small/config.json", "small/model.safetensors"),
    ),
    Target(
        "prune, stopped",
        make_stopped_prune,
        prune,
        (".out.partial/fitted/*0.mlp*.safetensors",),
    ),
    Target("masks", make_masks, use_masks, ("masks.safetensors",)),
    Target("settings of learn", make_settings, learn, ("run.yml", "task0.jsonl")),
    Target(
        "learn, stopped",
        make_learn,
        learn,
        (
            "out.training/run.json",
            "out.training/checkpoint-2/trainer_state.json",
            "out.training/checkpoint-2/masks.safetensors",
            "out.training/checkpoint-2/optimizer.pt",
        ),
    ),
    Target("judge", make_judge, use_judge, ("judge/config.json", "judge/model.safetensors")),
    Target("rows of judge", make_judge, use_rows, ("rows.jsonl",)),
    Target(
        "thinker",
        make_thinker,
        use_thinker,
        ("run/model/config.json", "run/model/model.safetensors"),
    ),
    Target("think evaluate", make_thinker, evaluate_thinker, ("run/run.json", "run/result.json")),
    Target(
        "think train, stopped",
        make_stopped_training,
        make_longer,
        (
            "run/run.json",
            "run/checkpoints/checkpoint-10/thinker_state.pt",
            "run/checkpoints/checkpoint-10/trainer_state.json",
            "run/checkpoints/checkpoint-10/optimizer.pt",
        ),
    ),
    Target("examples", make_models, read_examples, ("task0.jsonl",)),
    Target("flags", make_flags, convert, ("flags.yml",)),
    Target("plan", make_plan, use_plan, ("plan.md",)),
)


def ways_of(path: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield the ways to break a file, by name."""
    whole = path.read_bytes()
    noise = random.Random(0).randbytes(max(64, len(whole)))
    for name, content in (
        ("empty", b""),
        ("half", whole[: len(whole) // 2]),
        ("without its last byte", whole[:-1]),
        ("noise", noise),
        ("zeros", bytes(len(whole))),
        ("NUL at its end", whole + b"\0"),
    ):
        yield name, lambda p, content=content: p.write_bytes(content)
    yield "absent", lambda p: p.unlink()
    yield "a folder", _into_folder
    yield "a link to nothing", _into_link
    if path.suffix == ".json":
        yield from _ways_of_json(path)
    if path.suffix == ".safetensors":
        yield from _ways_of_tensors(path)
    if path.suffix in (".yml", ".md", ".jsonl", ".txt"):
        yield from _ways_of_text(path)
    if path.suffix == ".pt":
        for name, value in (("a number", 3), ("another mapping", {"a": 1}), ("a list", [])):
            yield name, lambda p, value=value: torch.save(value, p)
        yield "a pickle that runs code", lambda p: p.write_bytes(pickle.dumps(Runs()))


class Runs:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> tuple:
        return (os.mkdir, ("it-ran",))


def _into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _into_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def _ways_of_text(path: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    texts = {"a bomb": BOMB, "deep": "a: " + DEEP, "a list": "- a\n- b\n", "a word": "word"}
    texts |= {"Latin-1": "caf\xe9: \xe9\n", "twice": path.read_text() * 2, "tabs": "a:\t- b\n\t- c"}
    for name, text in texts.items():
        encoding = "latin-1" if name == "Latin-1" else "utf-8"
        yield name, lambda p, text=text, encoding=encoding: p.write_text(text, encoding=encoding)
    if path.suffix != ".yml":
        return
    values = yaml.safe_load(path.read_text())
    for key in values:
        for number, value in enumerate(([], -1, "x", ["x", ["y"]])):
            yield (
                f"{key} {number}",
                lambda p, key=key, value=value: p.write_text(
                    yaml.safe_dump({**values, key: value})
                ),
            )
    yield "a date that is none", lambda p: p.write_text(path.read_text() + "\nx: 2024-13-45\n")
    yield "an object", lambda p: p.write_text("!!python/object/apply:os.mkdir [it-ran]")


def _ways_of_json(path: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    for name, text in (("[]", "[]"), ("{}", "{}"), ("null", "null"), ("3", "3"), ("deep", DEEP)):
        yield name, lambda p, text=text: p.write_text(text)
    whole = json.loads(path.read_text())
    for number, key in enumerate(whole if isinstance(whole, dict) else ()):
        if key == "seed":  # any number is one
            continue
        less = {name: value for name, value in whole.items() if name != key}
        yield f"without {key}", lambda p, less=less: p.write_text(json.dumps(less))
        for value in (
            VALUES[number % len(VALUES)],
            VALUES[(number + 3) % len(VALUES)],
        ):  # two of them for each
            changed = copy.deepcopy(whole)
            changed[key] = value
            yield f"{key}: {value!r}", lambda p, changed=changed: p.write_text(json.dumps(changed))


def _ways_of_tensors(path: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + size])
    body = path.read_bytes()[8 + size :]
    metadata = header.get("__metadata__", {})
    names = [name for name in header if name != "__metadata__"]
    first = names[0]

    def write(changed: dict[str, Any], body: bytes = body) -> Callable[[Path], object]:
        text = json.dumps(changed).encode()
        return lambda p: p.write_bytes(struct.pack("<Q", len(text)) + text + body)

    yield "a long header", lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + bytes(100))
    yield "no tensors", write({"__metadata__": metadata}, b"")
    for name, change in (
        ("another dtype", {"dtype": "I32"}),
        ("an unknown dtype", {"dtype": "X7"}),
        ("a negative shape", {"shape": [-1, 3]}),
        ("offsets outside", {"data_offsets": [0, 1 << 50]}),
        ("offsets that overlap", {"data_offsets": [0, len(body)]}),
    ):
        yield name, write({**header, first: {**header[first], **change}})
    tensors = load_file(path)
    floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    for name, change in (
        ("NaN", lambda t: torch.full_like(t, math.nan)),
        ("infinity", lambda t: torch.full_like(t, math.inf)),
        ("another shape", lambda t: torch.cat([t, t])),
        ("no values", lambda t: t[:0]),
        ("integers", lambda t: t.long()),
    ):
        if floats:
            changed = tensors | {floats[0]: change(tensors[floats[0]]).contiguous()}
            yield name, lambda p, changed=changed: save_file(changed, p, metadata or None)
    less = {name: tensor for name, tensor in tensors.items() if name != first}
    yield "without a tensor", lambda p: save_file(less, p, metadata or None)
    more = tensors | {"more": torch.zeros(2)}
    yield "one tensor more", lambda p: save_file(more, p, metadata or None)
    for key in metadata:
        rest = {name: value for name, value in metadata.items() if name != key}
        yield f"without {key}", lambda p, rest=rest: save_file(tensors, p, rest)
        for value in ("", "[]", "null", "x"):
            yield (
                f"{key}: {value}",
                lambda p, key=key, value=value: save_file(tensors, p, {**metadata, key: value}),
            )


def outcome_of(use: Callable[[], object], expected: object) -> tuple[str, str]:
    """Use an input, and judge what comes of it: "refused", "same", "other" or "foreign"."""
    try:
        found = use()
    except SystemExit as error:
        return ("refused", "usage") if error.code == 2 else ("foreign", repr(error))
    except ImportError as error:  # of a library that is not installed: it says what is missing
        return "refused", str(error)
    except BaseException as error:
        told = isinstance(error, (ValueError, OSError, RuntimeError))
        last = traceback.extract_tb(error.__traceback__)[-1]
        # an error of ours is raised by a statement of ours: not by what the statement calls
        ours = Path(last.filename).is_relative_to(ROOT / "src")
        raised = linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"
        return ("refused" if told and ours and raised else "foreign"), text
    if Path("it-ran").exists():
        return "foreign", "planted code ran"
    return ("same", "") if found == expected else ("other", f"{found} for {expected}"[:300])


@dataclass(frozen=True)
class Failed:
    """What a whole input must not come to."""

    text: str


def in_a_process(work: Callable[[], object], seconds: float) -> object:
    """Return what work returns in a process of its own; None where it hangs or crashes."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            with os.fdopen(write, "wb") as pipe:
                try:
                    result = work()
                except Exception:
                    result = Failed(traceback.format_exc())
                pickle.dump(result, pipe)
        finally:  # what the parent holds, such as its temporary folder, is not this process's
            os._exit(0)
    os.close(write)
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    return pickle.loads(content) if content else None


def inside(folder: Path, work: Callable[[], object]) -> Callable[[], object]:
    """Return work that runs in a folder."""

    def run() -> object:
        os.chdir(folder)
        return work()

    return run


def try_target(target: Target, place: Path, tell: Callable[[str], None]) -> Counter[str]:
    """Break a target's files in all ways; count the outcomes."""
    whole = place / "whole"
    whole.mkdir()
    made = in_a_process(inside(whole, target.make), 120)
    if isinstance(made, Failed):
        raise SystemExit(f"hostile: {target.name}: the input cannot be made: {made.text}")
    shutil.copytree(whole, place / "used", symlinks=True)
    begin = time.monotonic()
    expected = in_a_process(inside(place / "used", target.use), 120)
    usual = time.monotonic() - begin
    shutil.rmtree(place / "used")
    if expected is None or isinstance(expected, Failed):
        raise SystemExit(f"hostile: {target.name}: the whole input is not read: {expected}")
    counts: Counter[str] = Counter()
    for pattern in target.files:
        (file,) = whole.glob(pattern)
        relative = file.relative_to(whole)
        for way, harm in ways_of(file):
            folder = place / "case"
            shutil.copytree(whole, folder, symlinks=True)
            harm(folder / relative)
            work = inside(folder, lambda: outcome_of(target.use, expected))
            outcome = in_a_process(work, usual + SECONDS)
            kind, text = outcome if isinstance(outcome, tuple) else ("no answer", str(outcome))
            counts[kind] += 1
            if kind not in ("refused", "same"):
                tell(f"{target.name}: {relative} ({way}): {kind}: {text}")
            shutil.rmtree(folder)
    return counts


def main(arguments: list[str] | None = None) -> None:
    """Try all targets, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TARGET", help="default: all")
    options = parser.parse_args(arguments)
    known = [target.name for target in TARGETS]
    if unknown := set(options.names) - set(known):
        raise SystemExit(f"hostile: expected names of {', '.join(known)}, got {unknown}")
    for name in ("heads.lora", "heads.pairwise", "kronecker", "mergekit_lite.masks", "thinker"):
        importlib.import_module(name)  # once, so that no case pays for it
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    problems: list[str] = []
    for target in TARGETS:
        if options.names and target.name not in options.names:
            continue
        with tempfile.TemporaryDirectory() as place:
            counts = try_target(target, Path(place), problems.append)
        total += counts
        print(f"{target.name}: {dict(counts)}", flush=True)
        for problem in problems:
            print(f"  {problem}", flush=True)
        problems.clear()
    print(f"{sum(total.values())} inputs: {dict(total)}")
    if set(total) - {"refused", "same"}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
