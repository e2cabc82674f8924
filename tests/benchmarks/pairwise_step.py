"""Two answers and a verdict over real pairs: tokens that are read, for the tokens that there are.

The ways: what a careful user does, single texts sorted by length, padded, under sdpa, in batches of
so many tokens (in training, pairs sorted by length); sentence-transformers' CrossEncoder; ours,
without padding. Forward is from texts to verdicts; forward and backward is one pass over the same
pairs in training mode. In turn in one process; peaks of one training step are of processes of their
own. Needs the folder of real data and the MiniLM encoder of the extra `bench`.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from heads.pairwise import Pair
from tests.benchmarks.measure import interleave, run_alone
from tests.benchmarks.pairwise_trial import DATA, real_pairs
from tests.benchmarks.results import ROOT, Row, append, latest, put
from tests.support import real

GUIDE = ROOT / "docs" / "pairwise.md"
OURS, CAREFUL, CROSS = (
    "PairwiseModel",
    "padded, sorted by length",
    "sentence-transformers CrossEncoder",
)
IMPLS = (OURS, CAREFUL, CROSS)
FORWARD, BOTH = "forward", "forward + backward"
LIMIT, TOKENS = 512, 4096  # of a sequence; of a batch of the careful way, padding included


def sample(count: int) -> list[Pair]:
    """Real pairs at evenly spaced places of the distribution of lengths, in a drawn order."""
    pairs = sorted(real_pairs(), key=lambda pair: 2 * len(pair.prompt) + len(pair.a) + len(pair.b))
    chosen = [pairs[int((k + 0.5) * len(pairs) / count)] for k in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def padded(model: Any, answers: Sequence[Any]) -> Tensor:
    """Features of answers in one padded pass."""
    tokens = [answer.tokens for answer in answers]
    longest = max(len(one.ids) for one in tokens)
    ids, mask, of_answer, types = (
        torch.zeros(len(tokens), longest, dtype=torch.long) for _ in range(4)
    )
    for row, one in enumerate(tokens):
        size = len(one.ids)
        ids[row, :size], types[row, :size] = torch.from_numpy(one.ids), torch.from_numpy(one.types)
        mask[row, :size], of_answer[row, one.begin : size] = 1, 1
    ids, mask, of_answer, types = (part.to(model.device) for part in (ids, mask, of_answer, types))
    states = model.encoder(
        input_ids=ids, attention_mask=mask, token_type_ids=types
    ).last_hidden_state.float()
    return (states * of_answer[..., None]).sum(1) / of_answer.sum(1, keepdim=True)


def by_tokens(sizes: Sequence[int]) -> list[list[int]]:
    """Numbers in order of size, in batches of `TOKENS` at most with their padding."""
    batches: list[list[int]] = [[]]
    for number in sorted(range(len(sizes)), key=sizes.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * sizes[number] > TOKENS:
            batches.append([])
        batches[-1].append(number)
    return batches


def prepare(
    impl: str,
    mode: str,
    pairs: int,
    batch: int,
    dropout: float | None,
    dtype: torch.dtype,
    device: str,
) -> Callable[[], object]:
    """One pass over the pairs; ``step.tokens`` is how many there are."""
    from transformers import AutoModel

    from heads.pairwise import PairwiseCollator, PairwiseModel, predict_pairs
    from heads.pairwise.functional import pairwise_loss

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = sample(pairs)
    changes = {} if dropout is None else {"attention_probs_dropout_prob": dropout}
    if impl == CROSS:
        return _cross_encoder(mode, data, batch, changes, dtype, device)
    inner = AutoModel.from_pretrained(real.minilm(), **changes)
    model = PairwiseModel.from_encoder(
        inner, _tokenizer(), dtype=dtype, ties=False, max_tokens=LIMIT
    ).to(device)
    if impl == CAREFUL:
        model.encoder.set_attn_implementation("sdpa")
    held, collate = model.dataset(data, progress=False), PairwiseCollator()

    @torch.no_grad()
    def judge() -> None:
        given = model.dataset(data, progress=False)
        if impl == OURS:
            predict_pairs(model, given, batch_size=batch, progress=False)
            return
        answers = [given.answer(k) for k in range(2 * len(given))]
        features = torch.empty(len(answers), model.head.in_features, device=device)
        for numbers in by_tokens([len(one.tokens.ids) for one in answers]):
            features[numbers] = padded(model, [answers[k] for k in numbers])
        model.head(features[::2], features[1::2])

    def train() -> None:
        order = (
            sorted(range(len(held)), key=lambda k: held.lengths[k])
            if impl == CAREFUL
            else range(len(held))
        )
        for start in range(0, len(held), batch):
            items = [held[k] for k in order[start : start + batch]]
            if impl == OURS:
                loss = model(**{k: v.to(device) for k, v in collate(items).items()}).loss
            else:
                features = padded(model, [answer for item in items for answer in item["answers"]])
                labels = torch.tensor([item["label"] for item in items], device=device)
                loss = pairwise_loss(model.head(features[::2], features[1::2]), labels)
            loss.backward()
            model.zero_grad()

    model.train(mode != FORWARD)
    step: Any = judge if mode == FORWARD else train
    step.tokens = sum(held.lengths)
    return step


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real.minilm())


def _cross_encoder(
    mode: str, data: Sequence[Any], batch: int, changes: dict, dtype: torch.dtype, device: str
) -> Any:
    """Each answer scored with its prompt, and trained by the difference of scores."""
    from sentence_transformers import CrossEncoder

    made = CrossEncoder(
        str(real.minilm()),
        num_labels=1,
        max_length=LIMIT,
        device=device,
        config_kwargs=changes,
        model_kwargs={"dtype": dtype},
    )
    texts = [(pair.prompt, answer) for pair in data for answer in (pair.a, pair.b)]

    def judge() -> None:
        made.predict(texts, batch_size=2 * batch, show_progress_bar=False)

    def train() -> None:
        for start in range(0, len(texts), 2 * batch):
            part = texts[start : start + 2 * batch]
            given = made.tokenizer(
                part, padding=True, truncation=True, max_length=LIMIT, return_tensors="pt"
            ).to(device)
            scores = made.model(**given).logits[:, 0].float()
            signs = torch.tensor(
                [1.0 if pair.label == 0 else -1.0 for pair in data[start // 2 : start // 2 + batch]]
            )
            (
                -torch.nn.functional.logsigmoid(signs.to(device) * (scores[::2] - scores[1::2]))
            ).mean().backward()
            made.model.zero_grad()

    made.model.train(mode != FORWARD)
    return judge if mode == FORWARD else train


def measure(
    mode: str,
    dropout: float | None,
    pairs: int,
    batch: int,
    dtype: torch.dtype,
    device: str,
    runs: int,
) -> list:
    """Rows of all ways, in turn."""
    impls = [
        impl for impl in IMPLS if impl != CROSS or importlib.util.find_spec("sentence_transformers")
    ]
    peaks = {}  # first, while nothing is held here
    if mode == BOTH:
        for impl in (OURS, CAREFUL):
            peaks[impl] = run_alone(
                prepare, impl, mode, batch, batch, dropout, dtype, device, device=device
            )[0]
    steps: dict[str, Any] = {
        impl: prepare(impl, mode, pairs, batch, dropout, dtype, device) for impl in impls
    }
    tokens = steps[OURS].tokens
    for impl in impls:  # a turn is minutes long: a few pairs warm it up
        prepare(impl, mode, batch, batch, dropout, dtype, device)()
    results = interleave(steps, runs, device, warm=True)
    del steps
    without = "" if dropout is None else ", no attention dropout"
    shape = f"MiniLM, {pairs} real pairs, {tokens} tokens, batch {batch}{without}"
    rows = []
    for impl, times in results.items():
        rows.append(
            Row.of(
                "pairwise",
                impl,
                mode,
                str(dtype),
                shape,
                times,
                peaks.get(impl, 0),
                device=device,
                packages=("torch", "transformers", "sentence-transformers"),
            )
        )
    clock = "wall_p50" if device == "cuda" else "cpu_p50"
    told = {row.impl: round(tokens / getattr(row, clock)) for row in rows}
    print(mode, dtype, shape, told, [row.peak_bytes for row in rows], flush=True)
    return rows


def write_table() -> None:
    """The guide's table, from the newest rows on CPU."""
    rows = [
        row for row in latest("pairwise.csv") if "CPU" in row["hardware"] and row["impl"] in IMPLS
    ]
    found = {(row["mode"], row["dtype"], row["shape"], row["impl"]): row for row in rows}
    kinds = [kind for kind in dict.fromkeys(key[:3] for key in found) if (*kind, CAREFUL) in found]
    kinds = list(
        {
            (mode, dtype, "no attention" in shape): (mode, dtype, shape)
            for mode, dtype, shape in kinds
        }.values()
    )
    if not kinds:
        return
    lines = [
        "| tokens a second | pairs | dtype | " + " | ".join(IMPLS) + " |",
        "|---" * (len(IMPLS) + 3) + "|",
    ]
    for kind in kinds:
        mode, dtype, shape = kind
        pairs, tokens = (int(part.split()[0]) for part in shape.split(", ")[1:3])
        ours, cells = float(found[*kind, OURS]["cpu_p50"]), []
        for impl in IMPLS:
            row = found.get((*kind, impl))
            ratio = f" ({float(row['cpu_p50']) / ours:.2f})" if row and impl != OURS else ""
            cells.append(f"{tokens / float(row['cpu_p50']):.0f}{ratio}" if row else "")
        end = ", no attention dropout" if "no attention" in shape else ""
        lines.append(
            f"| {mode}{end} | {pairs:,} | {dtype.removeprefix('torch.')} | {' | '.join(cells)} |"
        )
    rows = [row for key, row in found.items() if key[:3] in kinds]
    some = rows[-1]
    lines += [
        "",
        "MiniLM, 6 layers, AlpacaEval's pairs; real tokens, CPU seconds of one thread, medians of "
        f"{some['runs']}; in brackets how many times as long as ours. Forward is from texts to "
        "verdicts; the padded variant sorts single texts by length and batches them by tokens, under "
        "sdpa. Lines may be of different processors: compare along a line, not between lines. "
        f"{some['hardware']}; {some['versions']}; {some['date']} at "
        f"{', '.join(dict.fromkeys(row['commit'] for row in rows))}.",
    ]
    put(GUIDE, lines, "speed")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--pairs", type=int, default=3000, help="of the forward rows; a tenth of it to train on"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="words that a cell's 'mode dtype' must all have"
    )
    options = parser.parse_args(arguments)
    try:
        real.data(DATA), real.minilm()
    except real.AbsentError as error:
        print(f"pairwise_step: skipped, {error}")
        return
    for dtype in (torch.float32, torch.bfloat16):
        for mode, dropout in ((FORWARD, None), (BOTH, None), (BOTH, 0.0)):
            if not all(word in f"{mode} {dtype}" for word in options.only):
                continue
            pairs, batch = (options.pairs, 32) if mode == FORWARD else (options.pairs // 10, 16)
            append(
                "pairwise.csv",
                measure(mode, dropout, pairs, batch, dtype, options.device, options.runs),
            )
    write_table()


if __name__ == "__main__":
    main()
