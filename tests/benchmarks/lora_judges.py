"""Which judges order answers rightly: real preferences and planted faults, to a JSON of results and
the guide's table.

Preferences are GPT-4's between answers of models (AlpacaEval, no ties) and polite rewrites before
rude ones; faults are planted in reference answers. A judge must put the better of two above the
other. Not timed. Needs SmolLM2 and the folder of real data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sacrebleu.metrics import CHRF

from heads.lora import LikelihoodGain
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

FOUND, GUIDE = RESULTS / "lora_judges.json", ROOT / "docs" / "lora.md"
# cases of a kind; characters of an answer at most, which bounds the time
COUNT, LONGEST = (300, 1500)


class Case(NamedTuple):
    """One prompt with a better and a worse answer, and a reference where there is one."""

    kind: str
    prompt: str
    better: str
    worse: str
    reference: str | None


def verdicts() -> Iterator[Case]:
    """GPT-4's preferences among answers of different models."""
    with gzip.open(real.data("alpaca_eval_pairs.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [r for r in rows if r["preference"] in (1, 2) and r["a"].strip() and r["b"].strip()]
    rows = [r for r in rows if max(len(r["a"]), len(r["b"])) <= LONGEST]
    for row in random.Random(0).sample(rows, COUNT):
        first = row["preference"] == 1
        better, worse = (row["a"], row["b"]) if first else (row["b"], row["a"])
        yield Case("GPT-4's verdicts", row["prompt"], better, worse, None)


def planted() -> Iterator[Case]:
    """Polite before rude, and references before what is wrong with certainty."""
    held = json.loads(
        real.data("rasbt_instruction-data-with-preference.json").read_text(encoding="utf-8")
    )
    rng = random.Random(1)
    rows = rng.sample([row for row in held if len(row["output"].split()) > 3], COUNT)
    for place, row in enumerate(rows):
        prompt = "\n\n".join(filter(None, (row["instruction"], row["input"])))
        good, words = row["output"], row["output"].split()
        polite = "polite before rude"
        yield Case(polite, prompt, row["chosen"], row["rejected"], good)
        shuffled = words[:]
        while shuffled == words:
            rng.shuffle(shuffled)
        yield Case("right before another row's", prompt, good, rows[place - 1]["output"], None)
        yield Case(
            "right before the same words in disorder", prompt, good, " ".join(shuffled), None
        )
        yield Case(
            "right before one word repeated", prompt, good, " ".join(["the"] * len(words)), None
        )
        yield Case(
            "right before its first half", prompt, good, " ".join(words[: len(words) // 2]), None
        )


def scores(cases: list[Case]) -> dict[str, list[tuple[float, float] | None]]:
    """What each judge gives the better and the worse answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.smollm2())
    judge = LikelihoodGain(AutoModelForCausalLM.from_pretrained(real.smollm2()), tokenizer)
    start = tokenizer.bos_token_id
    found: dict[str, list[tuple[float, float] | None]] = {}

    def note(name: str, values: Any) -> None:
        found.setdefault(name, []).append(None if values is None else (values[0], values[1]))

    for number, case in enumerate(cases):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": case.prompt}], tokenize=False, add_generation_prompt=True
        ).removeprefix(tokenizer.bos_token)
        before = [start, *tokenizer(asked, add_special_tokens=False)["input_ids"]]
        given, bare, size = [], [], []
        for answer in (case.better, case.worse):
            said = tokenizer(answer, add_special_tokens=False)["input_ids"]
            given.append(judge.log_likelihood(before, said))
            bare.append(judge.log_likelihood([start], said))
            size.append(len(said))
        note("the longer one", size)
        note("likelihood", given)
        note("likelihood a token", [g / n for g, n in zip(given, size, strict=True)])
        note("likelihood gain", [g - b for g, b in zip(given, bare, strict=True)])
        note(
            "likelihood gain a token",
            [(g - b) / n for g, b, n in zip(given, bare, size, strict=True)],
        )
        overlaps = None
        if case.reference is not None:
            answers = (case.better, case.worse)
            overlaps = [CHRF().sentence_score(one, [case.reference]).score for one in answers]
        note("overlap with the reference", overlaps)
        if number % 50 == 49:
            print(f"{number + 1} of {len(cases)}", flush=True)
    return found


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    kinds = list(found["cases"])
    lines = ["| judge | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for judge, shares in found["judges"].items():
        cells = ("-" if shares[kind] is None else f"{shares[kind]:.0%}" for kind in kinds)
        lines.append(f"| {judge} | " + " | ".join(cells) + " |")
    count = max(found["cases"].values())
    text = (
        f"How often a judge puts the better of two answers first; equal scores count half. {count} "
        f"cases of each kind, so that one standard error is {0.5 / count**0.5:.0%} at most; the "
        "model is SmolLM2-135M-Instruct, its gain `LikelihoodGain`, the overlap chrF. "
        f"Measured {found['date']} at {found['commit']}."
    )
    put(GUIDE, [*lines, "", text], "judges")


def main(arguments: list[str] | None = None) -> None:
    """Judge every case; write the results and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        cases = [*verdicts(), *planted()]
        found = scores(cases)
    except real.AbsentError as error:
        print(f"lora_judges: skipped, {error}")
        return
    kinds = list(dict.fromkeys(case.kind for case in cases))
    judges: dict[str, dict[str, float | None]] = {}
    for name, pairs in found.items():
        judges[name] = {}
        for kind in kinds:
            held = [
                p
                for p, case in zip(pairs, cases, strict=True)
                if case.kind == kind and p is not None
            ]
            judges[name][kind] = (
                sum((a > b) + (a == b) / 2 for a, b in held) / len(held) if held else None
            )
    counts = {kind: sum(case.kind == kind for case in cases) for kind in kinds}
    result = {"date": today(), "commit": commit(), "cases": counts, "judges": judges}
    FOUND.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
