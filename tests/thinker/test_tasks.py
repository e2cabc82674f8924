"""Every task against its plain definition, row by row in Python; lengths, devices' generators, what
is refused."""

import itertools

import pytest
import torch

from thinker import (
    TASKS,
    AtTokens,
    CurriculumDataset,
    FlowPlan,
    Frontier,
    LatentThinker,
    SequenceTask,
    Task,
    ThinkerConfig,
    make_task,
    presets,
    register_task,
    solve,
)
from thinker.tasks import Sample, TensorTask


def number(digits, base):
    return sum(d * base**i for i, d in enumerate(digits))


def arithmetic(op):
    def check(task, tokens, answer, length):
        a, b = tokens[:length], tokens[length + 1 : 2 * length + 1]
        assert tokens[length] == task.base
        assert tokens[2 * length + 1] == task.base + 1
        a, b, found = (number(x, task.base) for x in (a, b, answer))
        assert found == op(a, b)
        assert max(a, b) <= (task.max_value or task.base**length)

    return check


def hops(task, tokens, answer, length):
    table, place = tokens[: task.size], tokens[task.size]
    assert not task.permutation or sorted(table) == list(range(task.size))
    for after in answer:
        assert after == place
        place = table[place]
    assert len(answer) == length + 1


def add_columns(task, tokens, answer, length):
    a, b = ([f(t, task.base) for t in tokens] for f in (lambda t, n: t // n, lambda t, n: t % n))
    assert a[-1] == b[-1] == 0
    assert number(answer, task.base) == number(a, task.base) + number(b, task.base)


def depth(task, tokens, answer, length):
    steps = [1 - 2 * t for t in tokens]
    assert answer == [sum(steps[: i + 1]) for i in range(length)]
    assert min(answer) >= 0
    assert max(answer) <= task.max_depth


DEFINITIONS = {
    "copy": lambda task, t, a, n: t == a,
    "reverse": lambda task, t, a, n: t[::-1] == a,
    "flip": lambda task, t, a, n: [task.symbols - 1 - x for x in t] == a,
    "roll": lambda task, t, a, n: [t[(i - task.shift) % n] for i in range(n)] == a,
    "sort": lambda task, t, a, n: sorted(t) == a,
    "prefix_sum": lambda task, t, a, n: [sum(t[: i + 1]) % task.symbols for i in range(n)] == a,
    "add": arithmetic(lambda a, b: a + b),
    "add_columns": add_columns,
    "depth": depth,
    "hops": hops,
}
OPTIONS = {
    "roll": [{"shift": 1}, {"shift": 5}, {"shift": -2}],
    "add": [
        {},
        {"base": 2},
        {"base": 10, "max_value": 9},
    ],
    "prefix_sum": [{}, {"symbols": 5}],
    "hops": [{}, {"size": 4, "permutation": False}],
    "depth": [{}, {"max_depth": 1}],
    "add_columns": [{}, {"base": 2}],
}
CASES = [(name, options) for name in DEFINITIONS for options in OPTIONS.get(name, [{}])]


def test_every_task_is_checked():
    assert set(DEFINITIONS) == {n for n in TASKS if not n.startswith("test_")}


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("ragged", [True, False])
def test_answers_are_right(name, options, ragged):
    task = make_task(name, **options)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(task.min_length, 10, (300,), generator=generator) if ragged else 7
    sample = task.sample(generator, 300, lengths)
    longest = int(lengths.max()) if ragged else 7
    assert sample.tokens.shape == sample.mask.shape == (300, task.input_length(longest))
    steps = (longest + 1,) if task.by_step else ()
    assert sample.targets.shape == (300, *steps, task.output_length(longest))
    assert int(sample.tokens.max()) < task.vocab_size
    for row in range(300):
        n = int(lengths[row]) if ragged else 7
        mask, told = sample.mask[row], sample.targets[row] != -100
        assert int(mask.sum()) == task.input_length(n)
        assert mask[: int(mask.sum())].all()  # padding is behind
        assert int(told.sum()) == task.output_length(n) * (n + 1 if task.by_step else 1)
        assert (sample.tokens[row][~mask] == 0).all()
        tokens, answer = sample.tokens[row][mask].tolist(), sample.targets[row][told].tolist()
        assert max(answer) < task.output_size
        assert DEFINITIONS[name](task, tokens, answer, n) is not False, (tokens, answer)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_sample_is_its_generators(name):
    task = make_task(name)
    a, b, c = (task.sample(torch.Generator().manual_seed(s), 50, 6) for s in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert not torch.equal(a.tokens, c.tokens)
    if task.output_length(6) == 1:
        assert len(a.targets.unique()) > 1


@pytest.mark.parametrize("at_tokens", [False, True])
@pytest.mark.parametrize("name", ["sort", "reverse"])
def test_exchanges_of_neighbors_bring_the_answer_about(name, at_tokens):
    plain, by_step = make_task(name, symbols=5), make_task(name, symbols=5, by_step=True)
    if at_tokens:
        plain, by_step = AtTokens(plain), AtTokens(by_step)
    lengths = torch.randint(1, 9, (80,), generator=torch.Generator().manual_seed(1))
    once, steps = (
        t.sample(torch.Generator().manual_seed(0), 80, lengths) for t in (plain, by_step)
    )
    assert torch.equal(once.tokens, steps.tokens)
    last = steps.targets[torch.arange(80), lengths - 1]
    assert torch.equal(last, once.targets)
    assert steps.targets.shape[1] == 8
    for row, length in enumerate(lengths.tolist()):
        known = once.targets[row] != -100
        states = [once.tokens[row][known], *steps.targets[row][:length, known]]
        for number, (before, after) in enumerate(itertools.pairwise(states)):
            assert sorted(before.tolist()) == sorted(after.tolist())
            # only between the pairs whose turn it is
            for place in (before != after).nonzero()[:, 0].tolist():
                other = place + 1 if place % 2 == number % 2 else place - 1
                assert before[place] == after[other]
        # sorted stays sorted; reversed is asked for no longer
        for after in steps.targets[row][length:, known]:
            assert torch.equal(after, states[-1]) if name == "sort" else (after == -100).all()


@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[0] != "hops"])
def test_at_tokens_is_the_same_task(name, options):
    """Start, input, blanks if the answer is not as long as the input; rows end together."""
    plain = make_task(name, **options)
    task = AtTokens(plain)
    lengths = torch.randint(1, 9, (60,), generator=torch.Generator().manual_seed(1))
    before, after = (t.sample(torch.Generator().manual_seed(0), 60, lengths) for t in (plain, task))
    assert after.tokens.shape == after.mask.shape == after.targets.shape == after.distance.shape
    for row, n in enumerate(lengths.tolist()):
        tokens = before.tokens[row][before.mask[row]].tolist()
        answer = before.targets[row][before.targets[row] != -100].tolist()
        mask = after.mask[row]
        width = task.input_length(n)
        assert mask.tolist() == [False] * (len(mask) - width) + [True] * width
        aligned = plain.output_length(2) == plain.input_length(2)
        blanks = [] if aligned else [plain.vocab_size + 1] * len(answer)
        expected = [plain.vocab_size, *tokens, *blanks]
        assert after.tokens[row][mask].tolist() == expected
        assert after.targets[row][mask].tolist() == [-100] * (width - len(answer)) + answer
        assert (after.distance[row][after.targets[row] == -100] == 0).all()
    assert int(after.tokens.max()) < task.vocab_size


FIRST = torch.Generator().manual_seed(0)
WITH_DISTANCES = [
    name for name in TASKS if make_task(name).sample(FIRST, 2, 4).distance is not None
]


@pytest.mark.parametrize("name", WITH_DISTANCES)
def test_an_answer_depends_on_nothing_farther_than_its_distance(name):
    """Inputs that agree within the distance, the ends of the sequence included, have the same
    answer there."""
    task = make_task(name)
    sample = task.sample(torch.Generator().manual_seed(0), 4000, 4)
    for place in range(sample.targets.shape[1]):
        far = int(sample.distance[0, place])
        near = sample.tokens[:, max(0, place - far) : place + far + 1]
        keys = {}
        for row, answer in zip(near.tolist(), sample.targets[:, place].tolist(), strict=True):
            assert keys.setdefault(tuple(row), answer) == answer


@pytest.mark.parametrize("base", [10, 16])
def test_operands_longer_than_64_bits(base):
    sample = make_task("add", base=base, max_value=1000).sample(
        torch.Generator().manual_seed(0), 50, 30
    )
    a = [number(row[:30].tolist(), base) for row in sample.tokens]
    assert 500 < max(a) <= 1000
    assert make_task("add").num_samples(1000) == 16**2000


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda tokens: tokens[:, :-1],
            r"Wrong.answer: expected .* \[2, 5\] or \[2, 1\], got \[2, 4\]",
        ),
        (lambda tokens: [1], r"Wrong.answer: expected .*, got list"),
        (lambda tokens: tokens + 1, r"Wrong.sample: targets .* the task's output_size is 3"),
    ],
)
def test_a_users_wrong_answer_is_refused(answer, message):
    class Wrong(SequenceTask):
        def answer(self, tokens, mask, lengths, place):
            return answer(tokens)

    with pytest.raises(ValueError, match=message):
        CurriculumDataset(AtTokens(Wrong(symbols=3)), Frontier(max_length=5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: presets.scan().data("copy"), r"expected a Task, such as .* got 'copy'"),
        (
            lambda: presets.scan().data(make_task("copy"), max_length="3"),
            "max_length is '3', expected a whole",
        ),
        (lambda: presets.scan().trainer(None, None, "x", max_steps=0), "max_steps is 0, expected"),
        (
            lambda: solve(make_task("copy"), None, [[1]]),
            "a LatentThinker and a Task, got Copy and NoneT",
        ),
    ],
)
def test_wrong_arguments_of_presets_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_users_own_task():
    @register_task("test_double")
    class Double(SequenceTask):
        """Twice each symbol."""

        def answer(self, tokens, mask, lengths, place):
            return (2 * tokens) % self.symbols

    try:
        sample = make_task("test_double", symbols=7).sample(torch.Generator().manual_seed(0), 4, 5)
        assert torch.equal(sample.targets, 2 * sample.tokens % 7)
        with pytest.raises(ValueError, match=r"register_task:.*'test_double'"):
            register_task("test_double")(Double)
    finally:
        del TASKS["test_double"]
    assert isinstance(sample, Sample)
    assert issubclass(Double, Task)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: make_task("juggle"), r"make_task:.*'juggle'.*add_columns"),
        (
            lambda g: make_task("copy", symbol=3),
            r"make_task copy: unknown field symbol",
        ),
        (lambda g: register_task("test_x")(int), r"register_task:.*SequenceTask"),
        (lambda g: make_task("copy", symbols=1), r"Copy:.*symbols.*1.*2"),
        (lambda g: make_task("copy").sample(g, 2, 0), r"Copy: length.*0.*1"),
        (
            lambda g: make_task("copy").sample(g, 3, torch.ones(2, dtype=torch.long)),
            r"Copy:.*\[2\].*\(3,\)",
        ),
        (
            lambda g: AtTokens(make_task("hops")),
            r"AtTokens:.*answer",
        ),
        (
            lambda g: AtTokens(AtTokens(make_task("copy"))),
            r"AtTokens:.*Task",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.Generator())


@pytest.mark.parametrize("name", ["add", "copy"])
def test_rows_of_unequal_lengths_get_answers_of_theirs(name):
    task = make_task(name)
    data = CurriculumDataset(task, Frontier(max_length=4))
    for latents in ("table", "tokens"):
        laid_out = AtTokens(task) if latents == "tokens" else task
        data = CurriculumDataset(laid_out, Frontier(max_length=4))
        model = LatentThinker(ThinkerConfig(**data.sizes(), latent_init=latents))
        rows = [[1, 16, 2, 17], [1, 2, 16, 3, 4, 17]] if name == "add" else [[1, 2], [3, 4, 5]]
        found = solve(model, laid_out, rows, max_steps=2)
        assert [len(answer) for answer in found.answers] == [2, 3]
        assert len(found.steps) == 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "got none"),
        ([[1], []], "row 1 is"),
        ([[1, 16]], "row 0 is .* 0 to 15"),
        ([[1.5]], "row"),
    ],
)
def test_rows_that_cannot_be_solved_are_refused(rows, words):
    task = make_task("copy")
    model = LatentThinker(ThinkerConfig(**CurriculumDataset(task).sizes()))
    with pytest.raises(ValueError, match=f"solve: .*{words}"):
        solve(model, task, rows)


def test_the_last_step_answers_where_each_step_has_an_answer():
    task = make_task("hops", size=10)
    model = LatentThinker(ThinkerConfig(**CurriculumDataset(task, Frontier(max_length=4)).sizes()))
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 3]]
    with pytest.raises(
        ValueError, match="expected max_steps, got None; each step of the task has its own"
    ):
        solve(model, task, rows)
    found = solve(model, task, rows, max_steps=30)
    assert found.steps == (30,)
    assert found.settled == (True,)


def test_tensors_and_arrays_are_rows_and_plans_have_their_steps():
    task = make_task("copy")
    sizes = CurriculumDataset(task, Frontier(max_length=4)).sizes()
    model = LatentThinker(ThinkerConfig(**sizes, memory="static", memory_size=20))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    lists, tensors, arrays = (
        solve(model, task, rows).answers for rows in (tokens.tolist(), tokens, tokens.numpy())
    )
    assert lists == tensors == arrays
    plan = FlowPlan.from_table("step | read_input | output\n1 | 1 | 0\n2 | 0 | 1\n")
    model = LatentThinker(ThinkerConfig(**sizes, plan=plan))
    assert solve(model, task, tokens).steps == (2, 2)


def test_rows_of_a_grid_have_its_size():
    rows = torch.randint(5, (20, 16), generator=torch.Generator().manual_seed(0))
    task = AtTokens(TensorTask(rows, rows, grid=True))
    sizes = CurriculumDataset(task).sizes()
    model = LatentThinker(ThinkerConfig(**sizes, latent_init="tokens", mixer="mlp"))
    assert len(solve(model, task, rows[:1], max_steps=2).answers[0]) == 16
    with pytest.raises(ValueError, match="row 0 has 3 ids; expected 16"):
        solve(model, task, [[1, 2, 3]])
    few = LatentThinker(ThinkerConfig(**sizes, causal=True, num_latents=3))
    with pytest.raises(ValueError, match="the model's latents are the last 3 tokens"):
        solve(few, task, rows[:1])
