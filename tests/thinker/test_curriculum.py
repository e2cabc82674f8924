"""Streams that depend on counters alone, held-out samples, schedules."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from thinker import AtTokens, CurriculumDataset, Frontier, SequenceTask, make_task
from thinker.curriculum import DetailedBatches
from thinker.schedules import Dynamic, Fixed, Progressive, Uniform
from thinker.tasks import Sample, TensorTask


def data_of(schedule=None, task="copy", **options):
    task = make_task(task) if isinstance(task, str) else task
    return CurriculumDataset(
        task, schedule or Frontier(max_length=9), **{"batch_size": 8, **options}
    )


def resumed(*options, **changes):
    """Other data that go on from the state of the usual ones."""
    return data_of(*options, **changes).load_state_dict(data_of().state_dict())


def same(a, b):
    return all(
        torch.equal(x, b[k]) if isinstance(x, torch.Tensor) else x == b[k] for k, x in a.items()
    )


def take(data, count, **options):
    loader = iter(DataLoader(DetailedBatches(data), batch_size=None, **options))
    return [next(loader) for _ in range(count)]


def test_the_stream_is_the_same_with_any_number_of_workers():
    expected = take(data_of(), 7)
    assert not same(expected[0], expected[1])
    for workers in (1, 2):
        found = take(data_of(), 7, num_workers=workers)
        assert [b["step"] for b in found] == list(range(7))
        assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_streams_differ_by_seed_and_rank_but_ranks_think_alike():
    first, seed, rank = (
        data_of(**o).batch(5, details=True) for o in ({}, {"seed": 1}, {"rank": 1})
    )
    assert not torch.equal(first["input_ids"], seed["input_ids"])
    assert not same(first, rank)
    both = [[data_of(rank=r, n_latent=(2, 5)).batch(i) for i in range(30)] for r in (0, 1)]
    for name, least, most in (("n_step", 1, 6), ("n_latent", 2, 5)):
        drawn = [[b[name] for b in batches] for batches in both]
        assert drawn[0] == drawn[1]
        assert set(drawn[0]) == set(range(least, most + 1))


def test_resumed_is_as_if_never_stopped():
    whole, first = data_of(Progressive(max_length=9, min_answers=1)), None
    right, total = torch.zeros(10), torch.zeros(10)
    right[1:] = total[1:] = 5
    expected, stream = [], whole.batches(details=True)
    for i in range(8):
        if i == 3:
            whole.report(right, total)
        if i == 4:
            first = whole.state_dict()
        expected.append(next(stream))
    again = data_of(Progressive(max_length=9, min_answers=1))
    again.load_state_dict(first)
    stream = again.batches(details=True)
    assert all(same(next(stream), b) for b in expected[4:])
    assert expected[2]["lengths"].max() == 1
    assert expected[3]["lengths"].max() == 2


def test_a_schedule_that_follows_accuracy_allows_no_workers():
    """Their copies of the data would not see the reports."""
    with pytest.raises(ValueError, match=r"num_workers is 1; expected 0, since Progressive"):
        take(data_of(Progressive(max_length=9)), 1, num_workers=1)


@pytest.mark.parametrize("task", ["copy", "add", "hops", "sort"])
def test_training_never_sees_what_is_held_out(task):
    data = data_of(Frontier(max_length=6), task, batch_size=128, holdout=0.3)

    def rows(batch):
        masked = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        return [tuple(t[m].tolist()) for t, m in masked]

    held = [data.held_out(64, length, details=True) for length in range(1, 7)]
    for batch in held:
        assert set(batch["lengths"].tolist()) <= set(range(1, 7))
    hidden = {r for b in held for r in rows(b) if bool(data._hold_out.lengths[b["lengths"][0]])}
    assert len(hidden) > 100
    seen = {r for step in range(60) for r in rows(data.batch(step, details=True))}
    assert not hidden & seen
    shown = data.held_out(64, 6, details=True)
    sample = [shown[k] for k in ("input_ids", "attention_mask", "labels")]
    assert data._hold_out.rows(Sample(*sample), shown["lengths"]).all()


def test_as_many_are_held_out_as_was_asked_whatever_the_padding():
    data, generator = data_of(holdout=0.2), torch.Generator().manual_seed(0)
    lengths = torch.full((4000,), 6)
    sample = data.task.sample(generator, 4000, lengths)
    held = data._hold_out.rows(sample, lengths)
    assert float(held.float().mean()) == pytest.approx(0.2, abs=0.03)
    padded = Sample(*(None if t is None else torch.nn.functional.pad(t, (0, 3)) for t in sample))
    assert torch.equal(held, data._hold_out.rows(padded, lengths))


def made_by(augment):
    return CurriculumDataset(given(augment=augment)[0], batch_size=8, holdout=0.0).batch(0)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


def given(n=400, **options):
    tokens = torch.arange(4 * n).view(n, 4) % 97
    return TensorTask(tokens, tokens.flip(1), **options), tokens


@pytest.mark.parametrize("at_tokens", [False, True])
def test_rows_that_are_given_are_in_training_or_held_out(at_tokens):
    """Each held-out row once and as it is; none of them, made another or not, in training."""

    def shifted(generator, tokens, targets):
        more = torch.randint(100, (len(tokens), 1), generator=generator)
        return tokens + 100 * more, targets + 100 * more

    task, tokens = given(augment=shifted, symbols=10_100)
    data = CurriculumDataset(AtTokens(task) if at_tokens else task, batch_size=64, holdout=0.2)
    first = slice(1, None) if at_tokens else slice(None)
    held = data.held_out(1000, 1, details=True)
    assert held["labels"].shape == (len(held["lengths"]), 5 if at_tokens else 4)
    rows = {tuple(row) for row in held["input_ids"][:, first].tolist()}
    assert 0.1 < len(held["input_ids"]) / 400 < 0.3
    assert rows <= set(map(tuple, tokens.tolist()))
    seen = torch.cat([data.batch(n, details=True)["input_ids"][:, first] for n in range(60)])
    assert int(seen.max()) > 97  # made others
    assert not rows & {tuple(row) for row in (seen % 100).tolist()}
    assert len({tuple(row) for row in (seen % 100).tolist()}) == len(
        set(map(tuple, tokens.tolist())) - rows
    )
    batch = data.batch(3, details=True)  # and the answers are those of what was made
    assert torch.equal(batch["labels"][:, first], batch["input_ids"][:, first].flip(1))
    assert len(data.held_out(7, 1, details=True)["input_ids"]) == 7
    assert not torch.equal(
        data.held_out(7, 1, details=True)["input_ids"],
        data.held_out(7, 1, seed=1, details=True)["input_ids"],
    )
    assert (
        len(CurriculumDataset(task, holdout=0.0).held_out(1000, 1, details=True)["input_ids"])
        == 400
    )


def test_rows_that_are_given_have_masks_and_answers_that_do_not_count():
    tokens = torch.arange(12).view(3, 4)
    mask, targets = (
        tokens % 4 < torch.tensor([[4], [2], [3]]),
        tokens.masked_fill(tokens % 2 == 1, -100),
    )
    task = TensorTask(tokens, targets, mask=mask)
    batch = CurriculumDataset(task, batch_size=30, holdout=0.0).batch(0, details=True)
    for got, whole in (("input_ids", tokens), ("labels", targets), ("attention_mask", mask)):
        assert torch.equal(batch[got], whole[batch["input_ids"][:, 0] // 4])
    others = [
        TensorTask(tokens, targets),
        TensorTask(tokens + 1, targets, mask=mask),
        TensorTask(tokens, tokens, mask=mask),
        TensorTask(tokens.flip(0), targets.flip(0), mask=mask.flip(0)),
        TensorTask(tokens, targets, mask=mask, grid=True),
        TensorTask(tokens, targets, mask=mask, augment=lambda g, a, b: (a, b)),
    ]
    assert len({repr(task), *map(repr, others)}) == 7
    at = AtTokens(task).sample(torch.Generator().manual_seed(0), 30, 1)
    assert ((at.targets == -100) | at.mask).all()  # no answer at padding
    left = TensorTask(
        torch.tensor([[5, 6, 0], [0, 5, 6]]), ones(2, 3), mask=torch.tensor([[1, 1, 0], [0, 1, 1]])
    )
    assert left.every(1).key[0] == left.every(1).key[1]  # the same row, wherever it is padded
    assert repr(task) == repr(TensorTask(tokens.int(), targets, mask=mask))


def test_a_moving_frontier_starts_at_the_least_length():
    schedule = Progressive(max_length=9, min_length=3)
    assert schedule.difficulty(0, torch.tensor(schedule.initial())) == 3
    assert (
        Progressive(max_length=9, min_length=3, start=5).difficulty(
            0, torch.tensor([5.0, 0.0, 0.0])
        )
        == 5
    )
    with pytest.raises(ValueError, match="got start=2"):
        Progressive(max_length=9, min_length=3, start=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: TensorTask(torch.ones(3, 4), torch.ones(3, 4)),
            r"TensorTask:.*\[3.*4\].*torch.float32",
        ),
        (
            lambda: TensorTask([[1]], torch.ones(1, 1)),
            r"TensorTask:.*\[\[1\]\]",
        ),
        (lambda: TensorTask(ones(3, 4), ones(2, 4)), r"TensorTask:.*\[2.*4\]"),
        (
            lambda: TensorTask(ones(3, 4), ones(3, 4), mask=ones(3, 3)),
            r"TensorTask:.*\[3.*3\].*\[3.*4\]",
        ),
        (
            lambda: TensorTask(ones(3, 4), ones(3, 4), mask=torch.ones(3, 4)),
            r"TensorTask:.*torch.float32",
        ),
        (lambda: TensorTask(ones(3, 4), ones(3, 4), mask=[[1]]), r"TensorTask:.*\[\[1\]\]"),
        (
            lambda: TensorTask(ones(3, 4), ones(3, 4), mask=ones(3, 4) - ones(3, 1)),
            r"TensorTask:.*has no token",
        ),
        (
            lambda: TensorTask(ones(3, 4).to(torch.uint16), ones(3, 4)),
            r"TensorTask:.*torch.uint16",
        ),
        (lambda: TensorTask(ones(3, 4), ones(3, 4), symbols=1), r"TensorTask:.*symbols.*1.*2"),
        (
            lambda: TensorTask(ones(3, 4), ones(3, 4), grid="no"),
            r"TensorTask:.*'no'",
        ),
        (
            lambda: TensorTask(ones(3, 4), ones(3, 4), augment=3),
            r"TensorTask:.*3.*function",
        ),
        (
            lambda: TensorTask(ones(3, 4), torch.tensor([[1, 2, -5, -100]] * 3)),
            r"TensorTask:.*1.*-5",
        ),
        (
            lambda: made_by(lambda g, a, b: a),
            r"TensorTask:.*\[2.*4\].*torch.int64",
        ),
        (
            lambda: made_by(lambda g, a, b: (a[:, :2], b)),
            r"TensorTask:.*\[2.*2\].*\[2.*4\]",
        ),
        (
            lambda: made_by(lambda g, a, b: (a + 90, b)),
            r"TensorTask:.*0.*96.*symbols=",
        ),
        (
            lambda: made_by(lambda g, a, b: (a, b - 200)),
            r"TensorTask:.*-100.*96",
        ),
        (
            lambda: CurriculumDataset(given()[0]).held_out(3, 7),
            r"TensorTask: expected length 1, .* got 7",
        ),
        (
            lambda: CurriculumDataset(given()[0]).held_out(-1, 1),
            r"CurriculumDataset.held_out: batch is -1; expected 1",
        ),
        (
            lambda: TensorTask(-ones(3, 4), ones(3, 4)),
            r"TensorTask:.*-1.*1.*0",
        ),
        (
            lambda: TensorTask(ones(3, 4), -100 * ones(3, 4)),
            r"TensorTask:.*-100",
        ),
        (
            lambda: TensorTask(ones(3, 4), ones(3, 1), grid=True),
            r"TensorTask:.*\[3.*1\].*torch.int64.*\[3.*4\]",
        ),
        (
            lambda: data_of(Uniform(max_length=5), given()[0]),
            r"CurriculumDataset:.*5.*TensorTask",
        ),
        (
            lambda: CurriculumDataset(given(4)[0], holdout=0.001).held_out(3, 1),
            r"CurriculumDataset:.*none.*4",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


WRONG_SAMPLES = {
    r"Wrong.sample returned tuple; expected a Sample": tuple,
    r"Wrong\.sample:.*2.*\(2.*10\).*\(2.*9\)": lambda s: s._replace(tokens=ones(2, 10)),
    r"Wrong\.sample:.*2.*\(2,\).*\(2.*9\)": lambda s: s._replace(targets=s.targets[:, 0]),
    r"Wrong\.sample:.*2.*\(1.*9\).*\(2.*9\)": lambda s: s._replace(targets=s.targets[:1]),
    r"Wrong\.sample:.*torch.int64.*99.*99.*int64.*0.*15": lambda s: s._replace(
        tokens=99 * ones(2, 9)
    ),
    r"tokens have dtype torch.int64 from -100 to -100": lambda s: s._replace(
        tokens=-100 * ones(2, 9)
    ),
    r"Wrong\.sample:.*torch.float32.*int64": lambda s: s._replace(targets=s.targets.float()),
    r"Wrong\.sample:.*torch.int64.*-1": lambda s: s._replace(
        targets=s.targets - 1 - s.targets.min()
    ),
    r"Wrong\.sample:.*\(2.*8\).*\(2.*9\)": lambda s: s._replace(mask=s.mask[:, :-1]),
    r"Wrong\.sample:.*\(9,\).*\(2.*9\)": lambda s: s._replace(distance=ones(9)),
    r"Wrong\.sample:.*\(2.*1\).*\(2,\)": lambda s: s._replace(key=ones(2, 1)),
}


@pytest.mark.parametrize("message", WRONG_SAMPLES)
def test_a_task_whose_samples_are_not_what_it_says_is_refused_before_anything_is_drawn(message):
    class Wrong(type(make_task("copy"))):
        def sample(self, generator, batch, length):
            return WRONG_SAMPLES[message](super().sample(generator, batch, length))

    with pytest.raises(ValueError, match=message):
        data_of(task=Wrong())


def test_a_batch_that_comes_in_segments_is_one_batch():
    data = data_of(n_latent=(2, 9))
    data.segments = 4
    batches = [data.batch(step, details=True) for step in range(12)]
    assert [b["segment"] for b in batches] == [0, 1, 2, 3] * 3
    for whole in (batches[:4], batches[4:8], batches[8:]):
        for part in whole[1:]:
            assert torch.equal(part["input_ids"], whole[0]["input_ids"])
            assert part["n_latent"] == whole[0]["n_latent"]
    assert not torch.equal(batches[0]["input_ids"], batches[4]["input_ids"])
    state = data.state_dict(4)
    data.segments = 1
    with pytest.raises(ValueError, match=r"CurriculumDataset:.*segments.*4.*1"):
        data.load_state_dict(state)


@dataclass(frozen=True, repr=False)
class Shifted(SequenceTask):
    """A task whose `repr` does not say what it does."""

    by: int = 1

    def __repr__(self):
        return "Shifted()"

    def answer(self, tokens, mask, lengths, place):
        return (tokens + self.by) % self.symbols


def test_another_task_of_the_same_name_does_not_go_on():
    state = CurriculumDataset(Shifted(by=1), n_step=(1, 4)).state_dict()
    CurriculumDataset(Shifted(by=1), n_step=lambda length: (1, 4)).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"CurriculumDataset: the state was saved with rows_checksum"
    ):
        CurriculumDataset(Shifted(by=2), n_step=(1, 4)).load_state_dict(state)


def test_another_task_whose_long_rows_alone_differ_does_not_go_on():
    class Turned(Shifted):
        def answer(self, tokens, mask, lengths, place):
            answer = super().answer(tokens, mask, lengths, place)
            return torch.where(lengths > 40, answer.flip(1), answer)

    schedule = Frontier(max_length=60)
    state = CurriculumDataset(Shifted(), schedule).state_dict()
    with pytest.raises(
        ValueError, match=r"CurriculumDataset: the state was saved with rows_checksum"
    ):
        CurriculumDataset(Turned(), schedule).load_state_dict(state)


def test_a_task_that_never_draws_the_same_rows_goes_on():
    class Fed(Shifted):
        """Rows that come from somewhere else."""

        def sample(self, generator, batch, length):
            return super().sample(torch.default_generator, batch, length)

    state = CurriculumDataset(Fed()).state_dict()
    CurriculumDataset(Fed()).load_state_dict(state)


def test_short_lengths_hold_nothing_out():
    data = data_of(Uniform(max_length=12), "prefix_sum", holdout=0.5, batch_size=256)
    assert data._hold_out.lengths.tolist() == [False] * 10 + [True] * 3  # 2^10 inputs are enough
    batch = data.batch(0, details=True)
    short = batch["input_ids"][batch["lengths"] == 2]
    assert len(torch.unique(short[:, :2], dim=0)) == 4


def test_with_everything_held_out_it_says_so():
    data = data_of(Fixed(max_length=9), holdout=0.999999)
    with pytest.raises(ValueError, match=r"CurriculumDataset:.*9.*smaller"):
        data.batch(0, details=True)


def drawn(schedule, state=None, step=0, batch=4000):
    state = torch.tensor(schedule.initial() if state is None else state)
    return schedule.lengths(torch.Generator().manual_seed(0), batch, step, state)


def test_schedules_draw_what_they_say():
    assert set(drawn(Fixed(max_length=5)).tolist()) == {5}
    assert set(drawn(Uniform(max_length=5, min_length=3)).tolist()) == {3, 4, 5}
    share = (drawn(Frontier(max_length=10)) == 10).float().mean()
    assert float(share) == pytest.approx(0.55, abs=0.03)


def test_progressive_moves_on_back_and_stays():
    schedule = Progressive(max_length=3, threshold=0.9, retreat=0.3, min_answers=10)

    def after(frontier, right, total):
        counts = torch.zeros(2, 4)
        counts[:, frontier] = torch.tensor([right, total], dtype=torch.float32)
        return schedule.update(torch.tensor([frontier, 0.0, 0.0]), *counts).tolist()

    assert after(1, 9, 10) == [2, 0, 0]
    assert after(2, 8, 10) == [2, 0, 0]  # between the thresholds it stays
    assert after(2, 2, 10) == [1, 0, 0]
    assert after(1, 0, 10) == [1, 0, 0]
    assert after(3, 10, 10) == [3, 0, 0]
    assert after(2, 9, 9) == [2, 9, 9]  # too few answers yet


def test_dynamic_prefers_what_is_wrong():
    schedule = Dynamic(max_length=3, floor=0.1, momentum=0.0)
    state = schedule.update(
        torch.tensor(schedule.initial()),
        torch.tensor([0.0, 10, 5, 0]),
        torch.tensor([0.0, 10, 10, 0]),
    )
    assert state.tolist() == [1, 0, 0.5, 1]  # nothing was seen of length 3
    counts = drawn(schedule, state.tolist()).bincount(minlength=4) / 4000
    torch.testing.assert_close(counts, torch.tensor([0, 0.1, 0.6, 1.1]) / 1.8, rtol=0, atol=0.03)


def test_steps_and_latents_by_length():
    data = data_of(Fixed(max_length=9), n_step=lambda n: (n, n + 6), n_latent=lambda n: 2 * n)
    found = [data.batch(s, details=True) for s in range(60)]
    assert {b["n_latent"] for b in found} == {18}
    assert {b["n_step"] for b in found} == set(range(9, 16))
    assert data.most_latents == 18


@pytest.mark.parametrize("task", [make_task("reverse", by_step=True), make_task("hops")])
def test_rows_drawn_again_are_asked_for_their_own_steps(task):
    data = data_of(Uniform(max_length=8), task=task, batch_size=64, holdout=0.3)
    steps = 1 if task.by_step and task.input_length(3) != 3 else 0  # hops ask for the start too
    for step in range(20):
        batch = data.batch(step, details=True)
        asked = (batch["labels"] != -100).any(-1).sum(1)
        assert torch.equal(asked, batch["lengths"] + steps)


@pytest.mark.parametrize(
    "task", [make_task("prefix_sum", symbols=9), *map(make_task, ("reverse", "add"))]
)
def test_an_input_is_held_out_wherever_it_is_padded(task):
    data = data_of(Uniform(max_length=9, min_length=5), task=AtTokens(task), holdout=0.3)
    for step in range(3):
        batch = data.batch(step, details=True)
        for row, length in enumerate(batch["lengths"].tolist()):
            width = data.task.input_length(length)
            alone = Sample(
                *(
                    batch[k][row : row + 1, -width:]
                    for k in ("input_ids", "attention_mask", "labels")
                )
            )
            assert alone.mask.all()
            assert not data._hold_out.rows(alone, torch.tensor([length])).any()
    held = data.held_out(20, 7, details=True)
    sample = Sample(held["input_ids"], held["attention_mask"], held["labels"])
    assert data._hold_out.rows(sample, torch.full((20,), 7)).all()
    assert held["distance"].shape == held["labels"].shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Uniform(max_length=0), r"Uniform:.*min_length.*1.*max_length.*0"),
        (lambda: Frontier(max_length=3, share=2), "share is 2"),
        (
            lambda: Progressive(max_length=3, threshold=0.2, retreat=0.5),
            r"Progressive:.*0.*<=.*<=.*1",
        ),
        (
            lambda: CurriculumDataset(make_task("copy"), 20),
            r"CurriculumDataset:.*make_task",
        ),
        (lambda: resumed(task="sort"), r"CurriculumDataset:.*Copy\(symbols=16\)"),
        (
            lambda: resumed(Uniform(max_length=9)),
            r"CurriculumDataset:.*Frontier\(.*",
        ),
        (lambda: resumed(holdout=0.2), r"CurriculumDataset:.*holdout.*0.1.*0.2"),
        (lambda: resumed(batch_size=3), r"CurriculumDataset:.*batch_size.*8.*3"),
        (lambda: resumed(n_step=7), r"CurriculumDataset:.*n_step.*1, 6.*7, 7"),
        (
            lambda: resumed(n_step=lambda n: (2, 6) if n == 5 else (1, 6)),
            r"n_step=\[1, 6\]; expected n_step=\[2, 6\]",
        ),
        (lambda: resumed(n_latent=3), r"CurriculumDataset:.*n_latent.*3, 3"),
        (lambda: Progressive(max_length=3, start=4), "got start=4"),
        (lambda: Dynamic(max_length=3, floor=0), "floor=0"),
        (
            lambda: data_of(n_step=lambda n: (3, n - 7)),
            r"CurriculumDataset:.*n_step.*\(3.*-6\).*1.*1",
        ),
        (lambda: data_of(batch_size=0), "batch_size is 0"),
        (lambda: data_of(n_step=0), r"CurriculumDataset:.*n_step.*0.*1"),
        (lambda: data_of(holdout=1.0), "holdout is 1.0"),
        (
            lambda: data_of().load_state_dict({**data_of().state_dict(), "seed": 3}),
            r"CurriculumDataset:.*state.*3",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_workers_that_live_on_repeat_no_batch():
    loader = DataLoader(
        DetailedBatches(data_of()), batch_size=None, num_workers=2, persistent_workers=True
    )
    steps = []
    for _ in range(3):
        steps += [batch["step"] for batch, _ in zip(loader, range(4), strict=False)]
    assert len(set(steps)) == 12
