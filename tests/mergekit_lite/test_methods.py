"""Every merge method against its definition: in memory with gradients, and streamed through files
in small blocks."""

import inspect
from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergekit_lite.engine.eager
import mergekit_lite.engine.fused
import mergekit_lite.engine.passes
import mergekit_lite.engine.selector
import mergekit_lite.methods.compiled
from mergekit_lite import METHODS, Noise, merge_method, merge_models, methods
from mergekit_lite.engine.programs import PROGRAMS
from mergekit_lite.engine.selector import Selector
from mergekit_lite.engine.tiles import EVERY
from mergekit_lite.methods import COMPILED, PerModel, get_method
from tests.mergekit_lite import reference
from tests.mergekit_lite.cases import CASES, NAME, SEED, inputs_for, reference_for, split
from tests.support.equivalence import judge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def merged_in_memory(case):
    method = get_method(case.method)

    def call(**tensors):
        models, base = split(tensors)
        return method(models, base, seed=SEED, name=NAME, **case.parameters)

    return call


def streamed(case, tensors, out, impl, threads=1):
    """The merge of one tensor through a folder."""
    models, base = split(tensors)
    report = merge_models(
        [{NAME: m} for m in models],
        case.method,
        base_model=None if base is None else {NAME: base},
        out=out,
        seed=SEED,
        threads=threads,
        progress=False,
        impl=impl,
        **case.parameters,
    )
    return load_file(report.out / "model.safetensors")[NAME]


def small_blocks(monkeypatch):
    """Blocks and samples of a few elements, so that small tensors have many."""
    monkeypatch.setattr(mergekit_lite.engine.eager, "EAGER_STRETCH", 50)
    monkeypatch.setattr(mergekit_lite.engine.passes, "BLOCK", 60)
    monkeypatch.setattr(mergekit_lite.engine.fused, "BLOCK", 60)
    monkeypatch.setattr(mergekit_lite.engine.passes, "_STRETCH", 3)


def has_kernel(case):
    method = get_method(case.method)
    bound = method.bind(case.models, case.parameters)
    return mergekit_lite.methods.compiled.has_kernel(method, bound, (3, 5))


def test_every_method_is_exported_by_its_package():
    assert {method.name for method in METHODS.values()} <= set(methods.__all__)


def test_every_kernel_has_a_row():
    assert set(PROGRAMS) == set(COMPILED)
    assert {case.method for case in CASES if has_kernel(case)} == {m.name for m in PROGRAMS}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", [c for c in CASES if has_kernel(c)], ids=str)
def test_kernels_write_the_bytes_of_the_torch_functions(case, dtype, tmp_path, monkeypatch):
    small_blocks(monkeypatch)
    for number, shape in enumerate([(17, 33), (3, 5), (1,)]):
        inputs = {name: value.to(dtype) for name, value in inputs_for(case, shape).items()}
        eager, fused = (
            streamed(case, inputs, tmp_path / f"{impl}{number}", impl)
            for impl in ("eager", "fused")
        )
        assert torch.equal(eager.view(torch.uint8), fused.view(torch.uint8))


def test_every_method_has_a_row():
    assert {c.method for c in CASES} == set(METHODS)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_memory_equals_the_reference(case, dtype):
    for shape in case.shapes:
        inputs = inputs_for(case, shape)
        judge(
            case.method,
            "eager",
            merged_in_memory(case),
            reference_for(case, inputs),
            inputs,
            dtype=dtype,
            working=torch.float32,
            gradients=case.gradients,
            case=f"{case} {list(shape)}",
            device="cpu",
        )


@pytest.mark.parametrize("case", [c for c in CASES if c.gradients], ids=str)
def test_gradients_by_finite_differences(case):
    inputs = {k: v.double() for k, v in inputs_for(case, (5, 3)).items()}
    if case.grid:  # step off the grid, where a change of rank would be a jump
        inputs = {
            k: v + torch.linspace(0, 1e-3, 15).view(5, 3).double() * (i + 1)
            for i, (k, v) in enumerate(inputs.items())
        }
    leaves = [v.requires_grad_() for v in inputs.values()]
    call = merged_in_memory(case)
    assert torch.autograd.gradcheck(
        lambda *values: call(**dict(zip(inputs, values, strict=True))), leaves
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_streamed_equals_the_reference(case, dtype, threads, tmp_path, monkeypatch):
    small_blocks(monkeypatch)
    impls = ["eager", "fused"] if has_kernel(case) else ["eager"]
    for number, shape in enumerate([(17, 33), (7,)] if len(case.shapes[0]) == 1 else [(17, 9)]):
        inputs = inputs_for(case, shape)
        for impl in impls:
            judge(
                case.method,
                "stream" if impl == "eager" else "fused",
                lambda impl=impl, number=number, **t: streamed(
                    case, t, tmp_path / f"{impl}{number}", impl, threads
                ),
                reference_for(case, inputs),
                inputs,
                dtype=dtype,
                working=torch.float32,
                gradients=False,
                case=f"{case} {list(shape)}",
                device="cpu",
            )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_odd_inputs(case):
    method = get_method(case.method)
    models, base = split(inputs_for(case, (6, 5)))
    whole = method(models, base, seed=SEED, **case.parameters)
    turned = [m.mT.contiguous().mT for m in models]  # not contiguous
    assert torch.equal(method(turned, base, seed=SEED, **case.parameters), whole)
    empty = [m[:0] for m in models]
    assert method(empty, None if base is None else base[:0], **case.parameters).shape == (0, 5)
    if len(models) + (base is not None) > 1:
        with pytest.raises(ValueError, match="shapes"):
            method([models[0][:2], *models[1:]], base, **case.parameters)


@pytest.mark.parametrize("method", ["ties", "breadcrumbs_ties", "dare_ties", "della"])
def test_equal_models_merge_to_themselves(method):
    model, base = torch.randn(8, 8), torch.randn(8, 8)
    extra = {"normalize": True}
    merged = get_method(method)([model, model], base, weight=0.5, density=1.0, **extra)
    torch.testing.assert_close(merged, model)


@pytest.mark.parametrize(
    ("random", "deterministic"),
    [
        ("dare_linear", "task_arithmetic"),
        ("dare_ties", "ties"),
        ("della_linear", "task_arithmetic"),
        ("della", "ties"),
    ],
)
def test_density_one_equals_the_deterministic_method(random, deterministic):
    models, base = [torch.randn(9, 7), torch.randn(9, 7)], torch.randn(9, 7)
    kwargs = {"weight": [0.4, 0.7]}
    left = get_method(random)(models, base, density=1.0, normalize=False, **kwargs)
    assert torch.equal(left, get_method(deterministic)(models, base, normalize=False, **kwargs))


def test_trimming_keeps_exactly_k_whatever_the_ties():
    base = torch.zeros(1000)
    model = torch.randint(-3, 4, (1000,), generator=torch.Generator().manual_seed(1)).float()
    for density in (0.001, 0.1, 0.5, 0.77, 0.999):
        kept = get_method("ties")([model], base, weight=1.0, density=density)
        nonzero = int((model != 0).sum())
        assert int((kept != 0).sum()) == min(max(1, int(density * 1000)), nonzero)


@pytest.mark.parametrize("truth", [True, False])
def test_booleans_may_be_words(truth):
    linear = get_method("linear")
    for word in (
        ["true", "yes", "on", "True", "ON"] if truth else ["false", "no", "off", "False", "OFF"]
    ):
        assert linear.bind(1, {"weight": 1.0, "normalize": word})["normalize"] is truth


def test_signatures_are_the_schema():
    """What the registry says of a method is what its function's signature says."""
    for method in METHODS.values():
        named = {
            p.rstrip("_")
            for p, a in inspect.signature(method.function).parameters.items()
            if a.kind is a.KEYWORD_ONLY
        }
        assert named - {"noise"} == set(method.parameters)


def test_a_method_from_outside_streams_too(tmp_path, monkeypatch):
    monkeypatch.setattr(mergekit_lite.engine.eager, "EAGER_STRETCH", 16)

    @merge_method("middle", inputs=(2, None), elementwise=True)
    def middle(tensors, base, *, weight: PerModel = 1.0, shift: float = 0.0):
        """The element-wise median."""
        return (
            torch.stack([t * w for t, w in zip(tensors, weight, strict=True)]).median(0).values
            + shift
        )

    try:
        models = [torch.randn(13, 7) for _ in range(3)]
        merge_models(
            [{"w": m} for m in models], "middle", shift=0.5, out=tmp_path / "o", progress=False
        )
        assert torch.equal(
            load_file(tmp_path / "o" / "model.safetensors")["w"], middle(models, shift=0.5)
        )
        with pytest.raises(ValueError, match="registered already"):
            merge_method("middle")(lambda tensors, base: tensors[0])
        for function in (lambda tensors: 0, lambda tensors, base, other: 0):
            with pytest.raises(ValueError, match=r"expected mine to be a function \(tensors, base"):
                merge_method("mine")(function)
    finally:
        METHODS.pop("middle")


def test_random_streams_are_fair():
    like = torch.empty(1 << 20)
    for p in (0.5, 0.3, 1e-4):
        whole = Noise(1, "x").keep(0, like, p)
        assert torch.equal(Noise(1, "x").keep(0, like[:1001], p), whole[:1001])
        deviation = (p * (1 - p) / whole.numel()) ** 0.5
        assert abs(float(whole.double().mean()) - p) < 5 * deviation
        for other in (
            Noise(1, "x").keep(1, like, p),
            Noise(1, "y").keep(0, like, p),
            Noise(2, "x").keep(0, like, p),
        ):
            agreement = ((whole - p) * (other - p)).double().mean() / (p * (1 - p))
            assert abs(float(agreement)) < 5 / whole.numel() ** 0.5


def test_each_element_can_have_its_own_chance():
    chances = torch.linspace(0.01, 0.99, 64).repeat(20_000, 1)
    kept = Noise(3, "x").keep_each(1, chances)
    spread = (chances[0] * (1 - chances[0]) / 20_000).sqrt()
    assert float(((kept.mean(0) - chances[0]) / spread).abs().max()) < 5
    assert torch.equal(kept[:9], Noise(3, "x").keep_each(1, chances[:9]))


def found_of(scores, selector, blocks):
    """Which scores are kept, after passes over blocks of bit patterns, in some order."""
    bits = scores.view(torch.int32).numpy()
    passes = 0
    while not selector.done:
        for number, (start, stop) in blocks.items():
            block = bits[start:stop]
            inside = block[(block >= selector.low) & (block < selector.high)]
            selector.take(number, int((block >= selector.high).sum()), inside)
        selector.advance()
        passes += 1
        assert passes < 12
    kept = scores > selector.threshold
    for number, (start, stop) in blocks.items():
        equal = start + (scores[start:stop] == selector.threshold).nonzero().flatten()
        budget = selector.budget(number)
        kept[equal if budget == EVERY else equal[:budget]] = True
    return kept


@pytest.mark.parametrize("collected", [1 << 20, 64])
@pytest.mark.parametrize("kind", ["spread", "equal", "two", "infinite"])
def test_the_selector_is_exact_whatever_the_distribution(kind, collected, monkeypatch):
    """With the sample misleading or absent, and windows too full to collect."""
    monkeypatch.setattr(mergekit_lite.engine.selector, "_COLLECT", collected)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5000, generator=generator).abs()
    scores = {
        "spread": scores,
        "equal": torch.full_like(scores, 0.7),
        "two": (scores > 0.5).float(),
        "infinite": torch.where(scores > 2, torch.inf, scores),
    }[kind]
    order = scores.sort(descending=True, stable=True).indices
    blocks = {i: (i * 500, i * 500 + 500) for i in range(10)}
    for sample in (scores[::50], scores[:0], torch.zeros(20), torch.full((20,), 9.0)):
        for k in (1, 37, 2500, 4999, 5000):
            selector = Selector(k, 5000, sample.contiguous().view(torch.int32).numpy())
            expected = torch.zeros(5000, dtype=torch.bool)
            expected[order[:k]] = True
            assert torch.equal(found_of(scores, selector, blocks), expected), k


def test_ties_at_the_threshold_go_to_the_lowest_places_in_any_order_of_arrival():
    scores = torch.tensor([2.0, 1.0, 1.0, 3.0, 1.0, 1.0])
    for order in permutations(range(3)):
        selector = Selector(4, 6, scores[:0].view(torch.int32).numpy())
        blocks = {i: (2 * i, 2 * i + 2) for i in order}
        assert found_of(scores, selector, blocks).tolist() == [True] * 4 + [False] * 2, order


@pytest.mark.parametrize("impl", ["eager", "fused"])
@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["positive", "negative"])
def test_trimming_refuses_nan_wherever_it_would_rank(bits, impl, tmp_path):
    model = torch.ones(100)
    model.view(torch.int32)[3] = bits
    for density in (0.01, 0.5, 1.0 - 1e-9):
        with pytest.raises(ValueError, match=r"w: selecting the largest elements.*NaN"):
            merge_models(
                [{"w": model}],
                "ties",
                base_model={"w": torch.zeros(100)},
                out=tmp_path / "o",
                impl=impl,
                weight=1.0,
                density=density,
                progress=False,
            )


def test_a_parameter_may_be_called_like_a_keyword():
    @merge_method("keyword", elementwise=True)
    def keyword(tensors, base, *, class_: float = 1.0):
        """A multiple."""
        return tensors[0] * class_

    try:
        assert keyword([torch.ones(2)]).tolist() == [1.0, 1.0]
        assert keyword([torch.ones(2)], class_=2.0).tolist() == [2.0, 2.0]
        merged = merge_models([{"w": torch.ones(2)}], "keyword", class_=3.0, progress=False)
        assert merged["w"].tolist() == [3.0, 3.0]
    finally:
        METHODS.pop("keyword")


def test_weights_that_vanish_in_float32_leave_the_base(tmp_path):
    states = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 1.0])}]
    for impl in ("eager", "fused"):
        merge_models(
            states,
            "ties",
            base_model={"w": torch.tensor([1.0, 1.0])},
            weight=1e-50,
            out=tmp_path / impl,
            impl=impl,
            progress=False,
        )
        assert load_file(tmp_path / impl / "model.safetensors")["w"].tolist() == [1.0, 1.0]


def test_a_method_of_ones_own_returns_a_tensor_of_its_inputs_shape(tmp_path):
    results = [
        lambda tensors, base: tensors[0][0],
        lambda tensors, base: tensors[0].T,
        lambda tensors, base: tensors[0].sum(),
        lambda tensors, base: tensors[0].numpy(),
        lambda tensors, base: tensors[0] + 1j,
    ]
    models = [{"w": torch.ones(2, 3)}, {"w": torch.zeros(2, 3)}]
    for number, function in enumerate(results):
        merge_method("odd")(function)
        try:
            for out in ({}, {"out": tmp_path / str(number)}):
                with pytest.raises(
                    ValueError, match=r"w: odd: expected a real tensor of shape \(2, 3\)"
                ):
                    merge_models(models, "odd", progress=False, **out)
        finally:
            METHODS.pop("odd")


def test_a_method_of_ones_own_may_change_its_inputs():
    merge_method("in_place")(lambda tensors, base: tensors[0].add_(tensors[1]))
    try:
        models = [{"w": torch.ones(3)}, {"w": torch.ones(3)}]
        for _ in range(2):
            assert merge_models(models, "in_place", progress=False)["w"].eq(2).all()
    finally:
        METHODS.pop("in_place")


def test_nothing_is_selected_where_variances_overflow(tmp_path):
    for name, values in (("a", [1e20, 0.0, 1.0]), ("b", [-3e20, 0.0, 2.0]), ("base", [0.0] * 3)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor(values)}, tmp_path / name / "model.safetensors")
    for impl in ("eager", "fused"):
        out = tmp_path / impl
        models = [tmp_path / "a", tmp_path / "b"]
        options = {"base_model": tmp_path / "base", "select_topk": 0.0, "impl": impl}
        merge_models(models, "sce", out=out, progress=False, **options)
        assert load_file(out / "model.safetensors")["w"].eq(0).all()


@pytest.mark.parametrize("impl", ["fused", "eager"])
def test_arcee_fusion_chooses_as_float64_does_where_rows_barely_differ(impl, tmp_path):
    generator = torch.Generator().manual_seed(0)
    # magnitudes of real weights; a float32 sum of p log(p / q) is mostly rounding here
    base = torch.randn(64, 1024, generator=generator) * 0.02
    model = base + torch.randn(64, 1024, generator=generator) * 1e-3
    out = tmp_path / "out"
    given = {"base_model": {"w": base}, "out": out, "impl": impl, "progress": False}
    merge_models([{"w": model}], "arcee_fusion", **given)
    expected = reference.arcee_fusion([model.double()], base.double()).float()
    assert torch.equal(load_file(out / "model.safetensors")["w"], expected)


def test_a_method_has_a_name_and_a_known_base():
    def first(tensors, base):
        return tensors[0]

    with pytest.raises(ValueError, match="expected a name, as in @merge_method"):
        merge_method(first)
    with pytest.raises(ValueError, match="base is 'need', expected one of required"):
        merge_method("first_of_all", base="need")(first)
