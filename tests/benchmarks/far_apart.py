"""Pairs of models, merged by `learn_merge` with each student and start.

Three pairs, all made of SmolLM2-135M-Instruct:

- chain: the model itself, asked for answers to Alpaca's instructions, and the same model after
  training on German manual pages;
- siblings: that German model, and one trained whole on Python sources; they share a base;
- adapters: LoRA adapters for German and for Python, merged into the base; they lie close.

What a merge recovers is its share of the gap between the average of the two models (0 %) and each
model on its own task (100 %). Searched methods and learning rates are chosen on rows that no other
run reads. Needs SmolLM2, the folder of real data, and Debian's German manual pages. On a GPU it
takes minutes; several runs share it, and three runs alone give seconds and memory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import random
import re
import shutil
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today, versions
from tests.support import real

FOUND, GUIDE = RESULTS / "far_apart.json", ROOT / "docs" / "masks.md"
WORK = Path(__file__).parent / "work" / "far_apart"
ROWS, SEARCH_ROWS, LENGTH = 400, 200, 128
HELD_OUT = 0.2
STEPS, LONG = 60, 240
# at 1.5e-3 the second model forgets a nat of Alpaca; at 6e-4 it forgot .17
SECOND_STEPS, SECOND_RATE, ADAPTER_RATE = 60, 1.5e-3, 1e-3
MANUALS = Path("/usr/share/man/de")
CHARACTERS = {"german": 400, "python": 400}  # of a text: some 128 tokens
ASKED, ANSWER = 40, 48  # prompts that are answered, and tokens of an answer
STUDENTS = ("masks", "lora", "all")
STARTS = ("average", "regmean")
PAIRS = ("chain-0", "chain-1", "chain-2", "siblings", "adapters")
# other seeds, whose merges are measured against more rivals and trained for longer
MORE = ("chain-3", "chain-4", "chain-5", "siblings-3")
SEARCHED, SEARCHED_LONG = "chain-0", "chain-3"  # the pairs on which learning rates are chosen
ALONE = 1.2  # minutes that are kept for the runs alone
# merges by data; the searches of rates start from one of their own rows
CALIBRATIONS = {"regmean": "regmean", "regmean++": "regmean++", "regmean-search": "regmean"}
RATES = {
    "masks": (1e-2, 3e-2, 1e-1, 3e-1),
    "lora": (1e-3, 2e-3, 4e-3, 8e-3),
    "all": (5e-5, 1e-4, 2e-4, 5e-4),
}
Job = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
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
    return (
        [str(WORK / f"{task}-{suffix}") for task in ("german", "python")],
        [
            "german",
            "python",
        ],
        base,
    )


# data


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


# what one process does


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
        learning_rate=ADAPTER_RATE if is_adapter else SECOND_RATE,
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
    from mergekit_lite.learning.run import held_out_losses
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
    if merge in ("first", "second"):
        return measured(pair, merge, models[merge == "second"])
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
        merge_models(models, "ties", base_model=base, weight=strength, density=0.5, **options)
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
    alone: bool = False,
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
        alone: Record the row's seconds and memory, which mean something if no other run shares the
            machine.
        **settings: More fields of `LearnConfig`.
    """
    from mergekit_lite import learn_merge

    warnings.simplefilter("ignore")
    models, tasks, _ = pair_of(pair)
    about = "-".join(
        map(str, (pair, start, train, steps, rate, seed, rows, search, *settings.values()))
    )
    out = WORK / "runs" / about
    data: list[Any] = [WORK / f"{task}{'_search' if search else ''}.json" for task in tasks]
    first = start
    if start == "regmean" and rows == 1.0:
        first = str(WORK / f"{pair}-regmean{'-search' if search else ''}")
    if rows < 1.0:
        data = [json.loads(file.read_text(encoding="utf-8")) for file in data]
        data = [part[: round(rows * len(part))] for part in data]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
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
        **settings,
    }
    losses = [round(loss, 4) for loss in report.losses[report.student]]
    if rows < 1.0:  # other rows than the table's are held out
        losses = losses_of(loaded(out), tasks)
    asked: dict[str, float] = {}
    if report.delivered == report.student and not search and "alpaca" in tasks:
        asked = answers_of(loaded(out))
    if alone:
        known["seconds"] = round(report.seconds, 1)
        if torch.cuda.is_available():
            known["peak_bytes"] = torch.cuda.max_memory_allocated()
    shutil.rmtree(out)
    shutil.rmtree(out.with_name(f"{out.name}.training"))
    return described(pair, losses=losses, **asked, **known)


# all of them


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the settings that identify a row, without its results."""
    chosen = ("pair", "merge", "start", "steps", "seed", "rows", "search", "granularity")
    more = ("coefficients", "temperature", *(["rate"] if row.get("search") else []))
    is_alone = "seconds" in row and "start" in row
    return (*(str(row.get(name)) for name in (*chosen, *more)), str(is_alone))


def key_of_job(job: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
    """Return the key of the row that a job will return."""
    if job is closed_form:
        return key_of({"pair": arguments[0], "merge": arguments[1]})
    if job is train_second:
        return None
    pair, start, train = arguments
    chosen = {"seed": 0, "rows": 1.0, "search": False, **named}
    if chosen.pop("alone", False):
        chosen["seconds"] = 0
    return key_of({"pair": pair, "start": start, "merge": train, **chosen})


class Runner:
    """Runs jobs in processes until the time is up, and writes each row as it comes.

    Args:
        workers: Processes at once.
        minutes: Minutes after which no job begins.
    """

    def __init__(self, workers: int, minutes: float):
        self.workers = workers
        self.deadline = time.time() + 60 * minutes
        self.pool: Any = None

    def all(self, jobs: Sequence[Job]) -> None:
        """Run jobs whose rows are not there yet; write the rows that they return."""
        self.finish(self.begin(jobs))

    def begin(self, jobs: Sequence[Job]) -> list[Any]:
        """Begin jobs whose rows are not there yet; return their futures."""
        made = {key_of(row) for row in read_found()}
        jobs = [job for job in jobs if key_of_job(*job) not in made]
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.workers, mp_context=context)
        return [
            self.pool.submit(_in_time, self.deadline, job, arguments, named)
            for job, arguments, named in jobs
        ]

    def finish(self, futures: Sequence[Any]) -> None:
        """Write the rows that jobs return, as they come."""
        for future in as_completed(futures):
            try:
                row = future.result()
            except Exception as error:  # the others go on
                print(f"failed: {type(error).__name__}: {error}", flush=True)
                continue
            if row is not None:
                rows = [old for old in read_found() if key_of(old) != key_of(row)]
                FOUND.parent.mkdir(parents=True, exist_ok=True)
                FOUND.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")
                left = self.deadline - time.time()
                print(f"{left:.0f} s left: {' '.join(key_of(row))} {row['losses']}", flush=True)


def _in_time(deadline: float, job: Callable[..., Any], arguments: tuple, named: Any) -> Any:
    torch.set_num_threads(1)
    return job(*arguments, **named) if time.time() < deadline else None


def best_rates() -> dict[tuple[str, str, int], float]:
    """Return by start, student and steps the rate with the lowest loss of the searches."""
    found: dict[tuple[str, str, int], dict[float, float]] = {}
    for row in read_found():
        if row.get("search"):
            place = (row["start"], row["merge"], row["steps"])
            found.setdefault(place, {})[row["rate"]] = sum(row["losses"])
    return {place: min(tried, key=lambda rate: tried[rate]) for place, tried in found.items()}


def run_all(runner: Runner, pairs: Sequence[str]) -> None:
    """Make the models, the merges, the searches and the table's runs, what matters most first."""
    runner.all([(train_second, names, {}) for names in second_models(pairs)])
    jobs: list[Job] = [
        (closed_form, (pair, merge), {})
        for merge in ("average", "regmean", "first", "second")
        for pair in pairs
    ]
    if SEARCHED in pairs:
        jobs.append((closed_form, (SEARCHED, "regmean-search"), {}))
    runner.all(jobs)
    if SEARCHED in pairs:
        runner.all(
            [
                (learned, (SEARCHED, start, train), {"steps": STEPS, "rate": rate, "search": True})
                for start in STARTS
                for train in STUDENTS
                for rate in RATES[train]
            ]
        )
    runner.all([job for start in STARTS[::-1] for job in students(pairs, start, STEPS)])


def run_more(runner: Runner) -> None:
    """Make the pairs of other seeds: more rivals, longer training, other settings."""
    runner.all([(train_second, names, {}) for names in second_models(MORE)])
    ends = ("average", "first", "second")
    jobs: list[Job] = [(closed_form, (pair, merge), {}) for merge in ends for pair in MORE]
    searches = runner.begin(jobs + long_searches())
    slow = [(closed_form, (pair, merge), {}) for pair in MORE for merge in rivals(pair)]
    others = runner.begin(slow + students(MORE, "average", STEPS))
    runner.finish(searches)
    # asked for before the others end, so that no worker waits
    runs = runner.begin(students(MORE, "average", LONG) + ablations())
    runner.finish([*others, *runs])


def students(pairs: Sequence[str], start: str, steps: int) -> list[Job]:
    """Return a run of each student on each pair."""
    rates = best_rates()
    return [
        (
            learned,
            (pair, start, train),
            {"steps": steps, "rate": rates.get((start, train, steps)), "seed": seed_of(pair)},
        )
        for pair in pairs
        for train in STUDENTS
    ]


def long_searches() -> list[Job]:
    """Return long runs at the rate that was best for short ones, and at the next lower one."""
    rates = best_rates()
    jobs: list[Job] = []
    for train in STUDENTS:
        place = RATES[train].index(rates["average", train, STEPS])
        for rate in RATES[train][max(0, place - 1) : place + 1]:
            options = {"steps": LONG, "rate": rate, "search": True}
            jobs.append((learned, (SEARCHED_LONG, "average", train), options))
    return jobs


def second_models(pairs: Sequence[str]) -> list[tuple[str, str]]:
    """Return task and name of the models that pairs are made of, beside SmolLM2."""
    names: dict[tuple[str, str], None] = {}
    for pair in pairs:
        for folder in pair_of(pair)[0]:
            if folder != str(real.smollm2()):
                task, _, name = Path(folder).name.partition("-")
                names[task, name] = None
    return list(names)


def seed_of(pair: str) -> int:
    """Return the seed of a pair, which is that of its training, too."""
    return int(pair.partition("-")[2] or 0)


def rivals(pair: str) -> tuple[str, ...]:
    """Return the merges without training that stand beside the average and RegMean."""
    if pair.startswith("chain"):  # its base is its first model
        return ("regmean", "regmean++", "linear", "slerp")
    return ("regmean", "regmean++", "task_arithmetic", "ties", "slerp", "tsv", "iso_c")


def ablations() -> list[Job]:
    """Return runs of masks with other settings, and of all students with a tenth of the rows."""
    rates = best_rates()
    changed = [
        {"granularity": "input"},
        {"granularity": "element"},
        {"granularity": "scalar"},
        {"coefficients": "evidence"},
        {"coefficients": "confidence"},
        {"temperature": 2.0},
    ]
    runs = [("masks", one) for one in changed] + [(train, {"rows": 0.1}) for train in STUDENTS]
    return [
        (
            learned,
            (SEARCHED_LONG, "average", train),
            {
                **one,
                "steps": STEPS,
                "rate": rates.get(("average", train, STEPS)),
                "seed": seed_of(SEARCHED_LONG),
            },
        )
        for train, one in runs
    ]


def run_alone(runner: Runner) -> None:
    """Measure seconds and memory of each student, one after the other."""
    rates = best_rates()
    for train in STUDENTS:
        options = {"steps": STEPS, "rate": rates.get(("regmean", train, STEPS)), "alone": True}
        runner.all([(learned, ("chain-0", "regmean", train), options)])


TITLES = {
    "chain": "base and fine-tune",
    "siblings": "two fine-tunes",
    "adapters": "two LoRA adapters",
}
ABOUT = {
    "chain": "SmolLM2-135M-Instruct, and the same after training on German manual pages",
    "siblings": "the same trained whole on German manual pages, and on Python sources",
    "adapters": "trained on these two by LoRA adapters of rank 16",
}


def in_table(row: dict[str, Any]) -> bool:
    """Return whether a row is of a merge without training, or of a student as it is by default."""
    if "start" not in row:
        return row["merge"] != "regmean-search"
    changed = {"granularity", "coefficients", "temperature", "peak_bytes"} & row.keys()
    return not row["search"] and row["steps"] == STEPS and row["rows"] == 1 and not changed


def recovered_by_merge(pair: str, rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """Return the fraction of a pair's gap that each merge recovers, and the mean gap of its two
    tasks in nats."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        if row["pair"] == pair:
            start = f" from {row['start']}" if "start" in row else ""
            losses[row["merge"] + start] = row["losses"]
    average = sum(losses["average"])
    gap = average - losses.pop("first")[0] - losses.pop("second")[1]
    return {name: (average - sum(values)) / gap for name, values in losses.items()}, gap / 2


def write_table() -> None:
    """Write the guide's table: a column for each kind of pair, with the spread of its seeds."""
    rows = [row for row in read_found() if in_table(row)]
    kinds: dict[str, list[str]] = {}
    for pair in PAIRS:
        kinds.setdefault(pair.partition("-")[0], []).append(pair)
    columns: dict[str, dict[str, list[float]]] = {}
    described: list[str] = []
    for kind, pairs in kinds.items():
        found = [recovered_by_merge(pair, rows) for pair in pairs]
        gap = statistics.mean(gap for _, gap in found)
        seeds = f"; mean of {len(pairs)} seeds ± standard deviation" if len(pairs) > 1 else ""
        described.append(f"{TITLES[kind]}: {ABOUT[kind]} ({gap:.2f} nats{seeds})")
        columns[kind] = {name: [share[name] for share, _ in found] for name in found[0][0]}
    first = next(iter(columns.values()))
    lines = [
        f"| merge | {' | '.join(TITLES[kind] for kind in columns)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    names = dict.fromkeys(name for shares in columns.values() for name in shares)
    # merges without a value in the first column come last
    for name in sorted(names, key=lambda name: -statistics.mean(first.get(name, [-9]))):
        cells = [_cell(shares.get(name, [])) for shares in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    made = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in rows)
    row = rows[0]
    about = (
        "Share of the gap in mean held-out loss that a merge recovers. 0 %: the average of the two "
        "models. 100 %: each model on its own task. Above 100 %: better than that. "
        f"{'; '.join(described)}. Students were trained for {STEPS} steps of 8 rows of at most "
        f"{LENGTH} tokens. Their rates, and the strengths of task_arithmetic and slerp, were chosen "
        f"on other rows. {row['hardware']}, {row['versions']}; {', '.join(made)}."
    )
    put(GUIDE, [*lines, "", about], "far apart")


def _cell(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    spread = f" ± {100 * statistics.stdev(shares):.0f}" if len(shares) > 1 else ""
    return f"{100 * statistics.mean(shares):.0f}{spread} %"


def main(arguments: list[str] | None = None) -> None:
    """Run what the time allows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, choices=PAIRS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--alone", action="store_true", help="seconds and memory, at the end")
    parser.add_argument("--more", action="store_true", help="the pairs of other seeds alone")
    parser.add_argument("--data", action="store_true", help="only write the rows")
    options, _ = parser.parse_known_args(arguments)
    write_data()
    if options.data:
        return
    kept = ALONE if options.alone else 0.0
    runner = Runner(options.workers, options.minutes - kept)
    if options.more:
        run_more(runner)
        return
    run_all(runner, options.pairs)
    if options.alone:
        run_alone(Runner(1, kept))
    write_table()


if __name__ == "__main__":
    main()
