"""Record hashes of results before a refactoring, and compare them after it.

    python -m tests.support.goldens write build/goldens.json   # before
    python -m tests.support.goldens check build/goldens.json   # after, on the same machine

Every entry is the hash of one result's bytes: a merged file, a bake, a pruned model, a loss with
its gradients, a judge's probabilities. A processor's own kernels decide the last bits, so the file
is not committed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import TrainingArguments, set_seed

import heads.lora
import kronecker
import thinker
from heads.pairwise import PairwiseTrainer
from mergekit_lite import extract_lora, merge_adapters, merge_models
from mergekit_lite.masks import KLConfig, MaskCollator, MaskConfig, MaskTrainer, Merger
from mergekit_lite.masks.constraints import CONSTRAINTS
from tests.heads.lora.test_accelerate import TARGETS, peft_model
from tests.heads.lora.test_accelerate import run as lora_run
from tests.heads.pairwise.support import model_of as judge_of
from tests.heads.pairwise.support import pairs_of
from tests.kronecker.test_training import rows
from tests.mergekit_lite.cases import CASES, inputs_for
from tests.mergekit_lite.layerwise.test_merging import DATA
from tests.mergekit_lite.masks.test_training import BATCH, MIXTURE
from tests.support.models import save, tiny
from tests.thinker.test_model import CASES as THINKERS
from tests.thinker.test_model import batch, model_of

IDS = torch.randint(3, 90, (6, 12), generator=torch.Generator().manual_seed(0))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def digest(*values: object) -> str:
    """Return the hash of tensors, dictionaries of them, bytes and numbers."""
    state = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            detached = value.detach().contiguous()
            state.update(f"{detached.dtype}{tuple(detached.shape)}".encode())
            state.update(detached.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value):
                state.update(str(name).encode())
                state.update(digest(value[name]).encode())
        elif isinstance(value, (list, tuple)):
            state.update(digest(*value).encode())
        else:
            state.update(value if isinstance(value, bytes) else repr(value).encode())
    return state.hexdigest()[:16]


def weights_of(folder: Path) -> str:
    """Return the hash of all weight files of a folder."""
    return digest(*(path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients that a backward pass has left."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def arguments(folder: Path, **changes: object) -> TrainingArguments:
    """Return the arguments of a training of four steps."""
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "report_to": "none",
    }
    options |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(str(folder), **options | changes)


def merges(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield every method, as tensors and from files, by torch and by kernels."""
    for number, case in enumerate(CASES):
        for dtype in DTYPES:
            shapes = {"w": (17, 33), "v": (40,)} if (40,) not in case.shapes else {"w": (17, 33)}
            states: dict[str, dict[str, torch.Tensor]] = {}
            for seed, (name, shape) in enumerate(shapes.items()):
                for model, tensor in inputs_for(case, shape, seed).items():
                    states.setdefault(model, {})[name] = tensor.to(dtype)
            base = states.pop("base", None)

            def in_memory(case=case, states=states, base=base) -> str:
                merged = merge_models(
                    list(states.values()),
                    case.method,
                    base_model=base,
                    seed=5,
                    progress=False,
                    **case.parameters,
                )
                return digest(merged)

            def files(
                case=case, states=states, base=base, number=number, dtype=dtype, impl="auto"
            ) -> str:
                out = folder / f"{number}-{dtype}-{impl}"
                merge_models(
                    list(states.values()),
                    case.method,
                    base_model=base,
                    seed=5,
                    progress=False,
                    out=out,
                    impl=impl,
                    **case.parameters,
                )
                return weights_of(out)

            yield f"merge/{case}/{dtype}/memory", in_memory
            yield f"merge/{case}/{dtype}/files", files


def checkpoints(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield merges of folders by data, with adapters and by recipes."""
    paths = [save(tiny("llama", seed), folder / f"llama{seed}") for seed in range(3)]

    def by_data(method: str) -> str:
        merge_models(paths[:2], method, calibration=DATA, out=folder / method, progress=False)
        return weights_of(folder / method)

    def by_kernel(method: str, dtype: str) -> str:
        out = folder / f"{method}-{dtype}"
        weight = {} if method == "model_stock" else {"weight": 0.5, "density": 0.4}
        merge_models(
            paths[:2], method, base_model=paths[2], out=out, dtype=dtype, progress=False, **weight
        )
        return weights_of(out)

    def extracted() -> str:
        extract_lora(paths[0], paths[1], folder / "lora", rank=3, progress=False)
        return weights_of(folder / "lora")

    def adapters() -> str:
        names = []
        for seed in (1, 2):
            extract_lora(paths[seed], paths[0], folder / f"lora{seed}", rank=3, progress=False)
            names.append(folder / f"lora{seed}")
        merge_adapters(
            names, out=folder / "adapters", method="ties", weight=0.5, density=0.5, progress=False
        )
        return weights_of(folder / "adapters")

    for method in ("regmean", "regmean++"):
        yield f"calibrated/{method}", lambda method=method: by_data(method)
    for method in ("ties", "dare_ties", "model_stock"):
        for dtype in ("float32", "bfloat16"):
            yield (
                f"folders/{method}/{dtype}",
                lambda method=method, dtype=dtype: by_kernel(method, dtype),
            )
    yield "extract_lora", extracted
    yield "merge_adapters", adapters


def masks(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield bakes, losses with gradients, and a training of learned masks."""
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

    def merger(kind: str = "gpt2", **config: object) -> Merger:
        models = [tiny(kind, seed, **(quiet if kind == "gpt2" else {})) for seed in range(2)]
        return Merger(models, MaskConfig(**{"initial": "random"} | config))

    def loss(config: KLConfig, **options: object) -> str:
        made = merger(**options)
        value = made.distill(config, **BATCH)
        value.backward()
        return digest(value, gradients(made))

    def baked(**options: object) -> str:
        out = folder / digest(options)
        merger(**options).bake(out, progress=False)
        return weights_of(out)

    def trained() -> str:
        made = merger(initial="average")
        collator = MaskCollator(pad_token_id=0)
        options = {"train_dataset": MIXTURE, "data_collator": collator}
        MaskTrainer(made, arguments(folder / "masks"), kl=KLConfig(), **options).train()
        return digest(dict(made.masks()))

    for constraint in CONSTRAINTS:
        for granularity in ("scalar", "input", "output", "element"):
            options = {"constraint": constraint, "granularity": granularity}
            name = f"masks/{constraint}/{granularity}"
            yield f"{name}/bake", lambda options=options: baked(**options)
            yield f"{name}/loss", lambda options=options: loss(KLConfig(), **options)
    for kind in ("llama", "mixtral", "gemma2"):
        yield f"masks/{kind}/bake", lambda kind=kind: baked(kind=kind)
        yield f"masks/{kind}/loss", lambda kind=kind: loss(KLConfig(temperature=2.0), kind=kind)
    for direction in ("forward", "reverse"):
        for coefficients in ("task", "evidence", "confidence", "fixed"):
            shares = {"shares": (0.3, 0.7)} if coefficients == "fixed" else {}
            config = KLConfig(
                direction=direction,
                coefficients=coefficients,
                l1=0.1,
                l2=0.1,
                similarity=0.1,
                **shares,
            )
            yield (
                f"masks/{direction}/{coefficients}",
                lambda config=config: loss(config, mode="efficient"),
            )
    yield "masks/trained", trained


def smaller(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield pruned, converted, folded and trained models."""
    data = [{"input_ids": part} for part in IDS.split(2)]

    def pruned(kind: str, **options: object) -> str:
        model = tiny(kind)
        kronecker.prune_(model, kronecker.PruneConfig(**options), calibration=data, progress=False)
        return digest(model.state_dict())

    def converted(kind: str, config: object, **options: object) -> str:
        model = tiny(kind)
        report = kronecker.convert_(model, config, calibration=data, progress=False, **options)
        out = folder / digest(kind, repr(config), repr(options))
        kronecker.save_pretrained(model, out)
        kronecker.fold(kronecker.from_pretrained(out), out.with_suffix(".folded"))
        return digest(
            model.state_dict(),
            report.after,
            weights_of(out),
            weights_of(out.with_suffix(".folded")),
        )

    def trained() -> str:
        teacher = tiny("llama")
        model = copy.deepcopy(teacher)
        kronecker.convert_(model, kronecker.LowRankConfig(), calibration=data, progress=False)
        set_seed(0)
        kronecker.KroneckerTrainer(
            model, arguments(folder / "kronecker"), train_dataset=rows(), teacher=teacher
        ).train()
        return digest(model.state_dict())

    for kind in ("gpt2", "llama", "bert", "mixtral", "gemma2"):
        yield f"prune/{kind}", lambda kind=kind: pruned(kind)
    yield "prune/closed form", lambda: pruned("llama", epochs=0, keep=0.3)
    yield "prune/fast", lambda: pruned("llama", method="fast", keep=0.3)
    yield "prune/blocks", lambda: pruned("llama", method="blocks")
    for kind in ("gpt2", "llama"):
        for init in ("sequential", "van_loan", "van_loan_normalized", "prune"):
            config = kronecker.KroneckerConfig(
                b_shape=(2, 1), rank=2 if init != "prune" else 1, init=init
            )
            yield f"convert/{kind}/{init}", lambda kind=kind, config=config: converted(kind, config)
        for init in ("sequential", "svd"):
            config = kronecker.LowRankConfig(init=init)
            yield (
                f"convert/{kind}/low rank {init}",
                lambda kind=kind, config=config: converted(kind, config),
            )
    yield "kronecker/trained", trained


def thinkers(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield answers and gradients of every kind of thinker, exits, tasks and a training."""

    def answered(case: str) -> str:
        changes = dict(THINKERS[case])
        rows = {k: changes.pop(k) for k in ("padded", "length", "lengths") if k in changes}
        model = model_of(**changes)
        tokens, mask = batch(**rows, left=bool(changes.get("causal")))
        torch.manual_seed(3)
        steps = model(
            tokens,
            mask,
            n_step=5,
            output_steps="all",
            **({} if model.config.at_tokens else {"out_len": 6}),
        )
        torch.stack(steps.step_logits).square().mean().backward()
        return digest(list(steps.step_logits), gradients(model))

    def exits(min_steps: int) -> str:
        model = model_of(latent_init="tokens", num_latents=None, positions="rotary")
        rule = thinker.ExitRule(threshold=0.5, min_steps=min_steps)
        with torch.no_grad():
            out = model(*batch(rows=9), n_step=12, exit_rule=rule)
        return digest(out.logits, out.steps, out.residuals)

    def drawn(name: str) -> str:
        lengths = thinker.Frontier(min_length=3, max_length=6)
        data = thinker.CurriculumDataset(thinker.make_task(name), lengths, batch_size=8)
        batches = iter(data)
        return digest([next(batches) for _ in range(3)])

    def trained(loss: Callable[[], object]) -> str:
        torch.manual_seed(0)
        task = thinker.AtTokens(thinker.make_task("prefix_sum"))
        data = thinker.CurriculumDataset(task, thinker.Frontier(max_length=6), batch_size=8)
        sizes = data.sizes(6) | {"hidden_size": 16, "num_heads": 2, "causal": True, "window": 2}
        model = thinker.LatentThinker(thinker.ThinkerConfig(**sizes, positions="rotary"))
        settings = thinker.thinker_arguments(
            folder / "t", max_steps=6, use_cpu=True, disable_tqdm=True, warmup_steps=2
        )
        set_seed(0)
        thinker.ThinkerTrainer(model, settings, train_dataset=data, step_loss=loss()).train()
        return digest(model.state_dict())

    for case in THINKERS:
        yield f"thinker/{case}", lambda case=case: answered(case)
    for least in (1, 2):
        yield f"thinker/exit from step {least}", lambda least=least: exits(least)
    for name in thinker.TASKS:
        yield f"thinker/task {name}", lambda name=name: drawn(name)
    for name, loss in (
        ("default", lambda: None),
        ("all steps", thinker.AllSteps),
        ("reach", thinker.Reach),
    ):
        yield f"thinker/trained {name}", lambda loss=loss: trained(loss)


def judges(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield probabilities, losses with gradients and a training of pairwise heads."""

    def judged(kind: str, **options: object) -> str:
        model = judge_of(kind, **options)
        data = model.dataset(pairs_of(12, labels=3 if model.config.ties else 2), progress=False)
        found = heads.pairwise.predict_pairs(model, data, progress=False)
        return digest(found.log_probabilities, found.swapped_log_probabilities, found.scores)

    def trained(**options: object) -> str:
        model = judge_of("bert", trained=False, **options)
        data = model.dataset(pairs_of(32), progress=False)
        PairwiseTrainer(
            model=model, args=arguments(folder / "judge", seed=3), train_dataset=data
        ).train()
        return digest(model.state_dict())

    for kind in ("bert", "llama", "mpnet", "modernbert"):
        yield f"judge/{kind}", lambda kind=kind: judged(kind)
    for link in ("davidson", "antisymmetric", "concat"):
        for ties in (True, False):
            yield (
                f"judge/{link}/{ties}",
                lambda link=link, ties=ties: judged("bert", link=link, ties=ties),
            )
        yield f"judge/{link}/trained", lambda link=link: trained(link=link)
    for pooling in ("mean", "first", "last"):
        yield (
            f"judge/{pooling}",
            lambda pooling=pooling: judged("bert", pooling=pooling, hidden_features=4),
        )
    yield "judge/surface", lambda: judged("bert", surface=("length", "style", "overlap"))


def adapters(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield outputs and gradients of LoRA's forward, and merged and exported files."""

    def forward(kind: str, dtype: torch.dtype, **changes: object) -> str:
        model = peft_model(kind, dtype, **changes)
        heads.lora.accelerate_lora_(model)
        return digest(lora_run(model))

    def merged() -> str:
        heads.lora.merge_lora(peft_model("llama"), folder / "merged")
        return weights_of(folder / "merged")

    for kind in TARGETS:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"lora/{kind}/{dtype}", lambda kind=kind, dtype=dtype: forward(kind, dtype)
    yield (
        "lora/two adapters",
        lambda: forward("llama", torch.float32, adapters=("default", "other")),
    )
    yield "lora/merge", merged


def record() -> dict[str, str]:
    """Return the hash of every result by name; a result that fails has its error instead."""
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for group in (merges, checkpoints, masks, smaller, thinkers, judges, adapters):
            folder = Path(root, group.__name__)
            folder.mkdir()
            for name, call in group(folder):
                torch.manual_seed(0)
                try:
                    found[name] = call()
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found


def main() -> None:
    """Write the hashes, or compare them and exit with 1 if any differs."""
    command, path = sys.argv[1], Path(sys.argv[2])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    found = record()
    if command == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} results, {sum(':' in v for v in found.values())} of them errors")
        return
    before = json.loads(path.read_text())
    for name in sorted(before.keys() | found.keys()):
        if before.get(name) != found.get(name):
            print(f"{name}: was {before.get(name)}, is {found.get(name)}")
    sys.exit(before != found)


if __name__ == "__main__":
    main()
