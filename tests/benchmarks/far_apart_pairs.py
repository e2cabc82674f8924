"""The pairs of models of `far_apart`: their data, their training, and what one process measures."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.benchmarks.results import RESULTS, commit, hardware, today, versions
from tests.support import real

FOUND = RESULTS / "far_apart.json"
WORK = Path(__file__).parent / "work" / "far_apart"
ROWS, SEARCH_ROWS, LENGTH = 400, 200, 128
HELD_OUT = 0.2
STEPS, LONG = 60, 240
SECOND_STEPS, ADAPTER_RATE = 60, 1e-3
# by task: at 1.5e-3 the German model forgets a nat of Alpaca, at 6e-4 it forgot .17; at 1.5e-3 the
# Python model was worse at Python than its base
SECOND_RATES = {"german": 1.5e-3, "python": 3e-4}
MANUALS = Path("/usr/share/man/de")
CHARACTERS = {"german": 400, "python": 400}  # of a text: some 128 tokens
ASKED, ANSWER = 40, 48  # prompts that are answered, and tokens of an answer
PAIRS = ("chain-0", "chain-1", "chain-2", "siblings", "adapters")
# other seeds, whose merges are measured against more rivals and trained for longer
MORE = ("chain-3", "chain-4", "chain-5", "siblings-6")
# whose students are trained with other settings, too, and searched at the greater number of steps
ABLATED = "chain-3"
# whose masks are trained with and without those of embedding and head
MODULES = "chain-6"
# merges by data; the searches of rates start from one of their own rows
CALIBRATIONS = {"regmean": "regmean", "regmean++": "regmean++", "regmean-search": "regmean"}
GERMAN = frozenset(
    [
        "der",
        "die",
        "das",
        "und",
        "ist",
        "nicht",
        "ein",
        "eine",
        "wird",
        "werden",
        "mit",
        "von",
        "für",
        "den",
        "dem",
        "zu",
    ]
)
ENGLISH = frozenset(
    [
        "the",
        "and",
        "is",
        "of",
        "to",
        "a",
        "in",
        "for",
        "with",
        "that",
        "it",
        "are",
        "as",
        "be",
        "this",
        "you",
    ]
)


def pair_of(name: str) -> tuple[list[str], list[str], str]:
    """Return the models of a pair, their tasks, and the base."""
    base = str(real.smollm2())
    kind, _, seed = name.partition("-")
    if kind == "chain":
        return [base, str(WORK / f"german-{seed}")], ["alpaca", "german"], base
    suffix = (seed or "0") if kind == "siblings" else "lora"
    tasks = ["german", "python"]
    return [str(WORK / f"{task}-{suffix}") for task in tasks], tasks, base


def write_data() -> None:
    """Write each task's rows: those of the merges, of the searches, and of the second models."""
    if (WORK / "python_train.json").is_file():
        return
    WORK.mkdir(parents=True, exist_ok=True)
    alpaca = [row for row in real.alpaca(2000) if row["output"].strip()]
    _write("alpaca", alpaca[:ROWS], alpaca[ROWS : ROWS + SEARCH_ROWS])
    texts = (manual(path) for path in sorted(MANUALS.rglob("*.gz")))
    _write_texts("german", texts)
    library = Path(sysconfig.get_path("stdlib"))
    sources = (path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))
    _write_texts("python", sources)


def _write(task: str, rows: Sequence[Any], search: Sequence[Any]) -> None:
    (WORK / f"{task}.json").write_text(json.dumps(rows), encoding="utf-8")
    (WORK / f"{task}_search.json").write_text(json.dumps(search), encoding="utf-8")


def _write_texts(task: str, texts: Iterable[str]) -> None:
    """Write stretches of texts; the second models read other texts than the merges."""
    parts: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    size = CHARACTERS[task]
    for number, text in enumerate(texts):
        for start in range(0, min(len(text), 20 * size) - size, size):
            parts[number % 2].append({"text": text[start : start + size]})
    for part in parts:
        random.Random(0).shuffle(part)
    _write(task, parts[0][:ROWS], parts[0][ROWS : ROWS + SEARCH_ROWS])
    (WORK / f"{task}_train.json").write_text(json.dumps(parts[1]), encoding="utf-8")


def manual(path: Path) -> str:
    """Return the text of a manual page, without roff's requests and escapes."""
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as file:
        lines = [line.strip() for line in file if not line.startswith((".", "'"))]
    text = re.sub(r"\\f.|\\[|&^]", "", " ".join(filter(None, lines)))
    return re.sub(r"\\(\(..|.)", lambda found: "-" if found[1] == "-" else " ", text)


def train_second(task: str, name: str) -> None:
    """Write a model trained on a task: whole with a seed, or with adapters ("lora")."""
    from heads.lora import tune
    from mergekit_lite import merge_models

    out = WORK / f"{task}-{name}"
    if out.exists():
        return
    is_adapter = name == "lora"
    report = tune(
        str(real.smollm2()),
        WORK / f"{task}_train.json",
        out=WORK / f"{task}-{name}.tuning",
        r=16 if is_adapter else 0,
        learning_rate=ADAPTER_RATE if is_adapter else SECOND_RATES[task],
        max_steps=SECOND_STEPS,
        max_length=LENGTH,
        seed=0 if is_adapter else int(name),
        answers=0,
        evaluations=2,
        progress=False,
    )
    source = str(report.out / "model")
    if is_adapter:
        source = f"{real.smollm2()}+{report.out / 'adapter'}"
    merge_models([source], "passthrough", dtype="bfloat16", out=out, progress=False)


def loaded(folder: Path | str) -> Any:
    """Return a model of a folder, on the device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def examples(task: str, *, search: bool) -> tuple[Any, Any]:
    """Return a task's training and held-out examples, as `learn_merge` splits them."""
    from transformers import AutoTokenizer

    from model_components._examples import TextExamples, split_examples

    file = WORK / f"{task}{'_search' if search else ''}.json"
    tokenizer = AutoTokenizer.from_pretrained(real.smollm2())
    return split_examples(TextExamples(file, tokenizer, max_length=LENGTH), HELD_OUT, 200)


def losses_of(model: Any, tasks: Sequence[str], *, search: bool = False) -> list[float]:
    """Return the held-out loss of each task."""
    from mergekit_lite.learning.tasks import held_out_losses
    from mergekit_lite.masks import MaskCollator

    tests = [examples(task, search=search)[1] for task in tasks]
    collator = MaskCollator(pad_token_id=0, max_length=LENGTH)
    return [round(loss, 4) for loss in held_out_losses(model, tests, collator)]


@torch.no_grad()
def answers_of(model: Any) -> dict[str, float]:
    """Return how many answers to Alpaca's prompts are German, and their chrF.

    Prompts are of rows that no run trains on.
    """
    from sacrebleu import corpus_chrf
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.smollm2(), padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    rows = json.loads((WORK / "alpaca_search.json").read_text(encoding="utf-8"))[:ASKED]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "\n".join(filter(None, (r["instruction"], r["input"])))}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for r in rows
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    batch = batch.to(model.device)
    out = model.generate(**batch, max_new_tokens=ANSWER, do_sample=False)
    answers = tokenizer.batch_decode(
        out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    words = [re.findall(r"\w+", answer.lower()) for answer in answers]
    german = [sum(w in GERMAN for w in one) > sum(w in ENGLISH for w in one) for one in words]
    chrf = corpus_chrf(answers, [[row["output"] for row in rows]]).score
    return {"german_answers": sum(german) / len(german), "chrf": round(chrf, 1)}


def described(pair: str, **known: Any) -> dict[str, Any]:
    """Return a row with its date, commit, hardware and versions."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "pair": pair,
        **known,
        "date": today(),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions("torch", "transformers"),
    }


def measured(pair: str, merge: str, folder: Path | str, **known: Any) -> dict[str, Any]:
    """Return the row of a model in a folder."""
    _, tasks, _ = pair_of(pair)
    model = loaded(folder)
    asked = answers_of(model) if "alpaca" in tasks else {}
    return described(pair, merge=merge, losses=losses_of(model, tasks), **asked, **known)


def closed_form(pair: str, merge: str) -> dict[str, Any]:
    """Write a merge without training; return its row. Its strength is searched, if it has one."""
    from mergekit_lite import merge_models

    warnings.simplefilter("ignore")
    models, tasks, base = pair_of(pair)
    whole = {"first": models[0], "second": models[1], "base": base}
    if merge in whole:
        return measured(pair, merge, whole[merge])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = WORK / f"{pair}-{merge}"
    if out.exists():
        return measured(pair, merge, out)
    if merge in CALIBRATIONS:
        search = merge == "regmean-search"
        started = time.perf_counter()
        calibration = [examples(task, search=search)[0][:256] for task in tasks]
        merge_models(
            models,
            CALIBRATIONS[merge],
            calibration=calibration,
            device=device,
            out=out,
            progress=False,
        )
        return measured(pair, merge, out, seconds=round(time.perf_counter() - started, 1))
    if merge == "average":
        merge_models(models, "linear", weight=[1.0, 1.0], out=out, progress=False)
        return measured(pair, merge, out)
    tried: dict[float, float] = {}
    for strength in (0.3, 0.5, 0.7, 1.0):
        folder = WORK / f"{pair}-{merge}-{strength}"
        shutil.rmtree(folder, ignore_errors=True)
        _searched_merge(models, base, merge, strength, folder)
        tried[strength] = sum(losses_of(loaded(folder), tasks, search=True)) / 2
    best = min(tried, key=lambda strength: tried[strength])
    row = measured(pair, merge, WORK / f"{pair}-{merge}-{best}", strength=best)
    for strength in tried:
        shutil.rmtree(WORK / f"{pair}-{merge}-{strength}")
    return row


def _searched_merge(
    models: Sequence[str], base: str, merge: str, strength: float, out: Path
) -> None:
    from mergekit_lite import merge_models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"out": out, "device": device, "progress": False}
    if merge == "linear":
        merge_models(models, "linear", weight=[1 - strength, strength], **options)
    elif merge == "slerp":
        merge_models(models, "slerp", base_model=models[0], t=strength, **options)
    elif merge == "ties":
        # weights of ties are divided by their sum, so its strength is lambda
        options["lambda"] = strength
        merge_models(models, "ties", base_model=base, weight=1.0, density=0.5, **options)
    elif merge == "task_arithmetic":
        merge_models(models, merge, base_model=base, weight=strength, **options)
    else:
        merge_models(models, merge, base_model=base, alpha=strength, **options)


def learned(
    pair: str,
    start: str,
    train: str,
    *,
    steps: int,
    rate: float | None,
    seed: int = 0,
    rows: float = 1.0,
    search: bool = False,
    all_modules: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Learn one merge; return its row.

    Args:
        pair: The pair.
        start: Average or regmean.
        train: The student.
        steps: Steps of 8 examples.
        rate: The learning rate.
        seed: The seed of the training.
        rows: The share of the training rows that is used.
        search: Use the rows of the searches.
        all_modules: Train masks of the embedding and the head, too, which `learn_merge` does not.
        **settings: More fields of `LearnConfig`.
    """
    from mergekit_lite import learn_merge
    from mergekit_lite.learning import run

    warnings.simplefilter("ignore")
    models, tasks, _ = pair_of(pair)
    about = "-".join(
        map(
            str,
            (pair, start, train, steps, rate, seed, rows, search, all_modules, *settings.values()),
        )
    )
    out = WORK / "runs" / about
    data: list[Any] = [WORK / f"{task}{'_search' if search else ''}.json" for task in tasks]
    first = start
    if start == "regmean" and rows == 1.0:
        first = str(WORK / f"{pair}-regmean{'-search' if search else ''}")
    if rows < 1.0:
        data = [json.loads(file.read_text(encoding="utf-8")) for file in data]
        data = [part[: round(rows * len(part))] for part in data]
    fixes = nullcontext()
    if all_modules:
        fixes = patch.object(run, "_fix_embedding_and_head")
    with fixes:
        report = learn_merge(
            models,
            data,
            out=out,
            start=first,
            train=train,
            max_steps=steps,
            learning_rate=rate,
            max_length=LENGTH,
            held_out=HELD_OUT,
            dtype="bfloat16",
            compare=(),
            seed=seed,
            progress=False,
            **settings,
        )
    known = {
        "merge": train,
        "start": start,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "rows": rows,
        "search": search,
        "all_modules": all_modules,
        **settings,
    }
    losses = [round(loss, 4) for loss in report.losses[report.student]]
    if rows < 1.0:  # other rows than the table's are held out
        losses = losses_of(loaded(out), tasks)
    asked: dict[str, float] = {}
    if report.delivered == report.student and not search and "alpaca" in tasks:
        asked = answers_of(loaded(out))
    shutil.rmtree(out)
    shutil.rmtree(out.with_name(f"{out.name}.training"))
    return described(pair, losses=losses, **asked, **known)


def read_found() -> list[dict[str, Any]]:
    """Return the rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []


def write_found(rows: Sequence[dict[str, Any]]) -> None:
    """Write all rows."""
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
