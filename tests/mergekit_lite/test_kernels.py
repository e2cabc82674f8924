"""The compiled kernels: without torch, without numba, without a cache; and what they refuse."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergekit_lite.engine.output
from mergekit_lite import merge_models
from mergekit_lite.engine import NotFiniteError, hashing
from mergekit_lite.engine.programs import PROGRAMS
from tests.mergekit_lite.cases import CASES
from tests.mergekit_lite.test_methods import has_kernel
from tests.support.models import save, save_tokenizer, tiny

KERNEL_CASES = {case.method: case for case in CASES if has_kernel(case)}
BLOCK = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from mergekit_lite import merge_models, load_recipe
for arguments in json.loads(sys.argv[2]):
    recipe = arguments.pop("recipe", None)
    report = merge_models(load_recipe(recipe) if recipe else arguments.pop("models"), **arguments, progress=False)
    print(json.dumps(report.notes))
"""


def run_without(packages, *merges, **environment):
    """Merges in a process that cannot import some packages; the notes of each."""
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", BLOCK, packages, json.dumps(merges, default=str)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("kernels")
    for number, dtype in enumerate(
        (*[torch.bfloat16] * 3, torch.float32, torch.float16, *[torch.bfloat16] * 4)
    ):
        generator = torch.Generator().manual_seed(number)
        state = {
            f"layers.{i}.w": torch.randn(40, 30, generator=generator).to(dtype) for i in range(3)
        }
        (root / str(number)).mkdir()
        save_file(state, root / str(number) / "model.safetensors")
    return [root / str(number) for number in range(9)]


def merges_of_every_kernel(folders, out):
    """One call a method, of two or one models with a base or three models without, in several
    dtypes."""
    for number, (name, case) in enumerate(KERNEL_CASES.items()):
        models = [str(folders[(i + number) % 8 + 1]) for i in range(case.models)]
        base = {"base_model": str(folders[0])} if case.base else {}
        yield {
            "models": models,
            "method": name,
            **base,
            "out": str(out / name),
            "seed": 3,
            **case.parameters,
        }


def test_a_merge_by_kernels_never_imports_torch(folders, tmp_path):
    run_without(
        "torch,transformers,safetensors,tqdm", *merges_of_every_kernel(folders, tmp_path / "lean")
    )
    for arguments in merges_of_every_kernel(folders, tmp_path / "torch"):
        merge_models(arguments.pop("models"), progress=False, impl="eager", **arguments)
        name = arguments["method"]
        lean, eager = (tmp_path / kind / name / "model.safetensors" for kind in ("lean", "torch"))
        assert lean.read_bytes() == eager.read_bytes(), name
        assert (
            len(
                {
                    (tmp_path / kind / name / "merge_manifest.json").read_text()
                    for kind in ("lean", "torch")
                }
            )
            == 1
        )


def test_adapters_vocabularies_and_stages_need_no_torch_either(tmp_path):
    import peft

    words = ["<unk>", *(f"w{i}" for i in range(20))]
    for number, name in enumerate(("base", "other")):
        save(tiny("llama", number, vocab_size=21 + number), tmp_path / name)
        save_tokenizer(tmp_path / name, [*words, "new"][: 21 + number])
    wrapped = peft.get_peft_model(
        tiny("llama", 0, vocab_size=21),
        peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    wrapped.save_pretrained(tmp_path / "adapter")
    recipe = f"""
name: first
merge_method: passthrough
models: [{{model: {tmp_path}/base+{tmp_path}/adapter}}]
---
merge_method: linear
models: [{{model: first}}, {{model: {tmp_path}/other}}]
parameters: {{weight: 0.5}}
tokenizer: {{source: union, pad_to_multiple_of: 8}}
"""
    run_without("torch,transformers,safetensors", {"recipe": recipe, "out": str(tmp_path / "out")})
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape[0] == 24
    assert not list(tmp_path.glob(".*"))


def test_without_numba_torch_writes_the_same_bytes_and_the_report_says_so(folders, tmp_path):
    merge = {
        "models": [str(f) for f in folders[1:3]],
        "method": "ties",
        "base_model": str(folders[0]),
    }
    settings = {"weight": 0.5, "density": 0.4}
    run_without("torch", {**merge, **settings, "out": tmp_path / "fused"})
    for name, blocked, environment in (
        ("none", "numba", {}),
        ("interpreted", "x", {"NUMBA_DISABLE_JIT": "1"}),
    ):
        notes = run_without(blocked, {**merge, **settings, "out": tmp_path / name}, **environment)
        assert any(
            "merged by torch, which is slower than compiled kernels: numba" in note
            for note in notes[0]
        )
        left, right = (tmp_path / which / "model.safetensors" for which in ("fused", name))
        assert left.read_bytes() == right.read_bytes()
        manifests = [
            (tmp_path / which / "merge_manifest.json").read_text() for which in ("fused", name)
        ]
        assert manifests[0] == manifests[1]


def test_a_run_without_numba_goes_on_where_one_with_it_stopped(folders, tmp_path, monkeypatch):
    out = tmp_path / "out"
    finish = mergekit_lite.engine.output.OutputFolder.finish
    done = []

    def finishing(self, name):
        finish(self, name)
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt

    arguments = {"models": [str(f) for f in folders[1:3]], "weight": 0.5, "max_shard_size": "3kB"}
    with monkeypatch.context() as patched:
        patched.setattr(mergekit_lite.engine.output.OutputFolder, "finish", finishing)
        with pytest.raises(KeyboardInterrupt):
            merge_models(
                arguments["models"], weight=0.5, max_shard_size="3kB", out=out, progress=False
            )
    partial = tmp_path / ".out.partial"
    finished = json.loads((partial / "progress.json").read_text())["shards"]
    times = {name: (partial / "result" / name).stat().st_mtime_ns for name in finished}
    run_without("numba", {**arguments, "out": str(out)})
    assert len(times) == 2
    assert len(list(out.glob("*.safetensors"))) == 3
    assert times == {name: (out / name).stat().st_mtime_ns for name in finished}


def test_kernels_are_compiled_once_and_loaded_without_numba(folders, tmp_path):
    merge = {"models": [str(f) for f in folders[1:3]], "method": "linear", "weight": 0.5}
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run_without("torch", {**merge, "out": tmp_path / "first"}, **cache)
    (kept,) = (tmp_path / "cache" / "model-components" / "merge").iterdir()
    code = f"""
import sys
from mergekit_lite import merge_models
merge_models({merge["models"]!r}, weight=0.5, out={str(tmp_path / "second")!r}, progress=False)
print("numba" in sys.modules)
"""
    environment = {**os.environ, **cache, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for expected in ("False", "True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.stdout.split() == [expected], done.stderr
        left, right = (tmp_path / which / "model.safetensors" for which in ("first", "second"))
        assert left.read_bytes() == right.read_bytes()
        shutil.rmtree(tmp_path / "second")
        if expected == "False":
            kept.write_bytes(kept.read_bytes()[:-100])  # cut short: compiled again


def test_a_cache_that_cannot_be_written_only_costs_time(folders, tmp_path):
    (tmp_path / "file").touch()
    merge = {"models": [str(f) for f in folders[1:3]], "method": "linear", "weight": 0.5}
    run_without("torch", {**merge, "out": tmp_path / "out"}, XDG_CACHE_HOME=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("poison", "place"), [(float("nan"), 0), (float("nan"), -1), (float("inf"), 0)]
)
@pytest.mark.parametrize("impl", ["eager", "fused"])
@pytest.mark.parametrize("method", KERNEL_CASES)
def test_nan_and_infinity_never_reach_a_file(method, impl, poison, place, tmp_path):
    case = KERNEL_CASES[method]
    states = [{"w": torch.randn(50)} for _ in range(case.models)]
    states[place]["w"][7] = poison
    base = {"base_model": {"w": torch.randn(50)}} if case.base else {}
    settings = {**base, **case.parameters, "out": tmp_path / "out", "progress": False, "impl": impl}
    with pytest.raises(ValueError, match="NaN"):
        merge_models(states, method, **settings)
    assert not (tmp_path / "out").exists()


def test_values_that_overflow_the_output_are_refused(tmp_path):
    for dtype in ("float16", "bfloat16"):
        state = {"w": torch.tensor([1.0, 3.4e38])}
        with pytest.raises(NotFiniteError, match=f"NaN or infinity in {dtype}"):
            merge_models(
                [state],
                "passthrough",
                scale=1.0,
                dtype=dtype,
                out=tmp_path / "o",
                progress=False,
                impl="fused",
            )


def test_an_explicit_impl_runs_or_raises(tmp_path):
    states = [{"w": torch.randn(6, 5)} for _ in range(2)]
    with pytest.raises(ValueError, match=r"merge_models:.*'fast'"):
        merge_models(states, weight=1, impl="fast")
    with pytest.raises(ValueError, match=r"merge_models:.*expected a kernel for every tensor"):
        merge_models(
            states[:1],
            "tsv",
            base_model=states[1],
            out=tmp_path / "o",
            progress=False,
            impl="fused",
        )
    with pytest.raises(ValueError, match=r"merge_models:.*expected a kernel for every tensor"):
        merge_models(
            states, weight=1, dtype="float64", out=tmp_path / "o", progress=False, impl="fused"
        )


def test_kernels_in_memory_too():
    states = [{"w": torch.randn(6, 5)} for _ in range(2)]
    eager, fused = (
        merge_models(states, weight=[1, 3], progress=False, impl=impl)["w"]
        for impl in ("eager", "fused")
    )
    assert torch.equal(eager, fused)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "ef46db3751d8e999"),
        (b"a", "d24ec4f1a98c6e5b"),
        (b"abc", "44bc2cf5ad770999"),
        (b"The quick brown fox jumps over the lazy dog", "0b242d361fda71bc"),
    ],
)
def test_checksums_are_xxh64(data, expected, tmp_path):
    (tmp_path / "f").write_bytes(data)
    assert hashing.hash_file(tmp_path / "f") == f"xxh64:{expected}"


def test_programs_are_those_of_the_package():
    assert all(
        method.function.__module__.startswith("mergekit_lite.methods") for method in PROGRAMS
    )


@pytest.mark.parametrize("impl", ["eager", "fused"])
@pytest.mark.parametrize("method", KERNEL_CASES)
def test_empty_tensors_and_scalars(method, impl, tmp_path):
    case = KERNEL_CASES[method]
    states = [
        {"e": torch.zeros(3, 0), "s": torch.tensor(0.5 * i + 1), "w": torch.randn(5)}
        for i in range(6)
    ]
    base = {"base_model": states[5]} if case.base else {}
    settings = {**base, **case.parameters, "out": tmp_path / "out", "progress": False, "impl": impl}
    merge_models(states[: case.models], method, **settings)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in merged.items()} == {
        "e": (3, 0),
        "s": (),
        "w": (5,),
    }


@pytest.mark.parametrize("method", ["karcher", "multislerp"])
def test_directions_that_cancel_are_no_noise(method, tmp_path):
    """One-element tensors have two directions; sums of them may be nothing but rounding."""
    generator = torch.Generator().manual_seed(0)
    for number in range(30):
        states = [{"w": torch.randn(1, generator=generator)} for _ in range(5)]
        largest = max(float(state["w"].abs()) for state in states)
        settings = {} if method == "karcher" else {"weight": [1.0, 1.0, 0.5, 0.5, 1.0]}
        results = []
        for impl in ("eager", "fused"):
            out = tmp_path / f"{impl}{number}"
            merge_models(states, method, out=out, progress=False, impl=impl, **settings)
            results.append(load_file(out / "model.safetensors")["w"])
        assert torch.equal(*results)
        assert float(results[0].abs()) <= largest * 1.0001


def test_zeros_keep_their_sign_as_torch_has_it(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.full((5000,), -0.0)}
    draw = lambda: {"w": torch.randint(-2, 3, (5000,), generator=generator) * 0.5}  # noqa: E731
    models = [draw(), draw()]
    for method, settings in {
        "ties": {"density": 0.3},
        "breadcrumbs": {"density": 0.3, "gamma": 0.1},
        "breadcrumbs_ties": {"density": 0.3, "gamma": 0.1},
        "dare_ties": {"density": 0.3, "rescale": False},
        "dare_linear": {"density": 0.3},
        "sce": {"select_topk": 0.3},
    }.items():
        weight = {} if method == "sce" else {"weight": [1.0, -0.5]}
        for impl in ("eager", "fused"):
            given = {
                "base_model": base,
                "out": tmp_path / f"{method}-{impl}",
                "progress": False,
                "impl": impl,
            }
            merge_models(models, method, **given, **settings, **weight)
        files = [
            (tmp_path / f"{method}-{impl}" / "model.safetensors").read_bytes()
            for impl in ("eager", "fused")
        ]
        assert files[0] == files[1], method


@pytest.mark.parametrize("columns", [1, 3, 300, 5000])
@pytest.mark.parametrize("values", ["normal", "few", "wide", "zeros"])
def test_ranks_are_exact_where_magnitudes_are_alike(columns, values, tmp_path):
    generator = torch.Generator().manual_seed(columns)
    base = torch.randn(7, columns, generator=generator)
    models = []
    for _ in range(2):
        change = torch.randn(7, columns, generator=generator)
        if values == "few":
            change = (change * 2).round() * 0.25
        elif values == "wide":
            change = change * 10 ** torch.randint(-30, 3, change.shape, generator=generator)
        elif values == "zeros":
            change = change * 0
        models.append({"w": base + change})
    settings = {"weight": [0.5, -0.25], "density": [0.6, 1.0], "epsilon": 0.2}
    for method in ("della", "della_linear"):
        for rescale in (True, False):
            files = []
            for impl in ("eager", "fused"):
                out = tmp_path / f"{method}-{rescale}-{impl}"
                given = {**settings, "rescale": rescale, "impl": impl, "progress": False}
                merge_models(models, method, base_model={"w": base}, out=out, **given)
                files.append((out / "model.safetensors").read_bytes())
            assert files[0] == files[1]
    files = []
    for impl in ("eager", "fused"):
        out = tmp_path / f"arcee_fusion-{impl}"
        given = {"base_model": {"w": base}, "out": out, "impl": impl, "progress": False}
        merge_models(models[:1], "arcee_fusion", **given)
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1]
