"""Two answers and a verdict over real pairs: tokens that are read, for the tokens that there are.

The ways: both answers padded to 512 tokens (the early way); padded to the longest of the batch in two passes; batches
of like length, padded; sentence-transformers' CrossEncoder; ours, without padding. Forward is from texts to verdicts;
forward and backward is one pass over the same pairs in training mode. In turn in one process; peaks of one training
step are of processes of their own. Needs the folder of real data and the MiniLM encoder of the extra `bench`.
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
from tests.benchmarks.results import README, ROOT, Row, append, latest, put
from tests.support import real

GUIDE = ROOT / "docs" / "pairwise.md"
OURS, EARLY, BUCKETED = "PairwiseModel", "padded to 512", "bucketed"
CROSS = "sentence-transformers CrossEncoder"
IMPLS = (OURS, EARLY, "padded to longest, two passes", BUCKETED, CROSS)
FORWARD, BOTH = "forward", "forward + backward"
LIMIT = 512


def sample(count: int) -> list[Pair]:
    """Real pairs at evenly spaced places of the distribution of lengths, in a drawn order."""
    pairs = [pair for pair in real_pairs() if pair.label != 2]
    pairs.sort(key=lambda pair: 2 * len(pair.prompt) + len(pair.a) + len(pair.b))
    chosen = [pairs[int((k + 0.5) * len(pairs) / count)] for k in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def padded(model: Any, sequences: Sequence[Any], length: int | None) -> Tensor:
    """Features of sequences in one padded pass."""
    longest = max(len(s.ids) for s in sequences) if length is None else length
    ids, mask = (torch.zeros(len(sequences), longest, dtype=torch.long) for _ in range(2))
    types = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.ids)], types[row, : len(sequence.ids)] = sequence.ids, sequence.types
        mask[row, : len(sequence.ids)] = 1
    ids, mask, types = (t.to(model.device) for t in (ids, mask, types))
    states = model.encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state.float()
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def verdicts(model: Any, items: Sequence[Any], length: int | None) -> Tensor:
    """Logits of a batch, one padded pass for A and one for B."""
    one, other = (padded(model, [item["sequences"][k] for item in items], length) for k in (0, 1))
    return model.head(one, other)


def prepare(
    impl: str, mode: str, pairs: int, batch: int, dropout: float | None, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    """One pass over the pairs; ``step.tokens`` is how many there are."""
    from transformers import AutoModel

    from heads.pairwise import PairwiseCollator, PairwiseModel, pairwise_loss

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = sample(pairs)
    changes = {} if dropout is None else {"attention_probs_dropout_prob": dropout}
    if impl == CROSS:
        return _cross_encoder(mode, data, batch, changes, dtype, device)
    inner = AutoModel.from_pretrained(real.minilm(), **changes)
    model = PairwiseModel.from_encoder(inner, _tokenizer(), dtype=dtype, ties=False, max_tokens=LIMIT).to(device)
    if impl != OURS:
        _ = model.packing  # ours would be chosen
        model.encoder.config._attn_implementation = "sdpa"
    held = model.dataset(data, progress=False)
    collate, length = PairwiseCollator(), LIMIT if impl == EARLY else None
    order = list(range(len(held)))
    if impl == BUCKETED:
        order.sort(key=lambda i: held.lengths[i])

    def batches(given: Any) -> Any:
        for start in range(0, len(order), batch):
            yield [given[i] for i in order[start : start + batch]]

    @torch.no_grad()
    def judge() -> None:
        given = model.dataset(data, progress=False)
        for items in batches(given):
            if impl == OURS:
                model(**{k: v.to(device) for k, v in collate(items).items()})
            else:
                verdicts(model, items, length)

    def train() -> None:
        for items in batches(held):
            labels = torch.tensor([item["label"] for item in items], device=device)
            if impl == OURS:
                loss = model(**{k: v.to(device) for k, v in collate(items).items()}).loss
            else:
                loss = pairwise_loss(verdicts(model, items, length), labels)
            loss.backward()
            model.zero_grad()

    model.train(mode != FORWARD)
    step: Any = judge if mode == FORWARD else train
    step.tokens = sum(held.lengths)
    return step


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real.minilm())


def _cross_encoder(mode: str, data: Sequence[Any], batch: int, changes: dict, dtype: torch.dtype, device: str) -> Any:
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
            given = made.tokenizer(part, padding=True, truncation=True, max_length=LIMIT, return_tensors="pt").to(
                device
            )
            scores = made.model(**given).logits[:, 0].float()
            signs = torch.tensor([1.0 if pair.label == 0 else -1.0 for pair in data[start // 2 : start // 2 + batch]])
            (-torch.nn.functional.logsigmoid(signs.to(device) * (scores[::2] - scores[1::2]))).mean().backward()
            made.model.zero_grad()

    made.model.train(mode != FORWARD)
    return judge if mode == FORWARD else train


def measure(
    mode: str, dropout: float | None, pairs: int, batch: int, dtype: torch.dtype, device: str, runs: int
) -> list:
    """Rows of all ways, in turn."""
    impls = [impl for impl in IMPLS if impl != CROSS or importlib.util.find_spec("sentence_transformers")]
    steps: dict[str, Any] = {impl: prepare(impl, mode, pairs, batch, dropout, dtype, device) for impl in impls}
    tokens = steps[OURS].tokens
    results = interleave(steps, runs, device)
    del steps
    without = "" if dropout is None else ", no attention dropout"
    shape = f"MiniLM, {pairs} real pairs, {tokens} tokens, batch {batch}{without}"
    rows = []
    for impl, times in results.items():
        peak = 0
        if mode == BOTH and impl in (OURS, EARLY):
            peak = run_alone(prepare, impl, mode, batch, batch, dropout, dtype, device, device=device)[0]
        rows.append(Row.of("pairwise", impl, mode, str(dtype), shape, times, peak, device=device,
                           packages=("torch", "transformers", "sentence-transformers")))  # fmt: skip
    clock = "wall_p50" if device == "cuda" else "cpu_p50"
    print(
        mode, shape, {r.impl: round(tokens / getattr(r, clock)) for r in rows}, [r.peak_bytes for r in rows], flush=True
    )
    return rows


def write_table() -> None:
    """The guide's table, from the newest rows on CPU."""
    rows = [r for r in latest("pairwise.csv") if "CPU" in r["hardware"]]
    if not rows:
        return
    found = {(r["mode"], r["shape"], r["impl"]): r for r in rows}
    lines = ["| tokens a second | " + " | ".join(IMPLS) + " |", "|---" * (len(IMPLS) + 1) + "|"]
    for mode, shape in dict.fromkeys(key[:2] for key in found):
        tokens = int(shape.split(" tokens")[0].split()[-1])
        held = [found.get((mode, shape, impl)) for impl in IMPLS]
        cells = [f"{tokens / float(r['cpu_p50']):.0f}" if r else "" for r in held]
        ours = held[0]
        assert ours is not None
        ratios = [f" ({float(r['cpu_p50']) / float(ours['cpu_p50']):.1f})" if r and r is not ours else "" for r in held]
        end = ", no attention dropout" if "no attention" in shape else ""
        cells = [cell + ratio for cell, ratio in zip(cells, ratios, strict=True)]
        lines.append(f"| {mode}{end} | {' | '.join(cells)} |")
    peaks = [r for r in rows if r["mode"] == BOTH and r["impl"] in (OURS, EARLY)]
    early = {r["shape"]: int(r["peak_bytes"]) for r in peaks if r["impl"] == EARLY}
    shares = [int(r["peak_bytes"]) / early[r["shape"]] for r in peaks if r["impl"] == OURS]
    some = rows[0]
    lines += [
        "",
        f"{some['shape'].split(', no')[0]}; real tokens, CPU seconds of one thread, medians of {some['runs']}; "
        "in brackets how many times ours is faster. Forward is from texts to verdicts. The peak of a training step is "
        f"{' and, without attention dropout, '.join(f'{share:.2f}' for share in shares)} of that padded to 512. "
        f"{some['hardware']}; {some['versions']}; {some['date']} at "
        f"{', '.join(dict.fromkeys(r['commit'] for r in rows))}.",
    ]
    put(GUIDE, lines, "speed")
    put(README, lines, "pairwise")


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        real.data(DATA), real.minilm()
    except real.AbsentError as error:
        print(f"pairwise_step: skipped, {error}")
        return
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    pairs, batch = (1024, 64) if cuda else (24, 8)
    for mode, dropout in ((FORWARD, None), (BOTH, None), (BOTH, 0.0)):
        append("pairwise.csv", measure(mode, dropout, pairs, batch, dtype, options.device, options.runs))
    write_table()


if __name__ == "__main__":
    main()
