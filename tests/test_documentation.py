"""The documentation says what the code does: every method, every parameter and default, every
judged operation."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import pipeline

from mergekit_lite import METHODS, load_recipe
from mergekit_lite.methods import CALIBRATED
from tests.heads.pairwise.support import DECODERS, PACKED, PADDED
from tests.support.models import save_tokenizer, tiny
from tests.support.notebooks import NAMES as NOTEBOOKS
from tests.support.reference import PAGES
from tests.support.reference import text as text_of
from tests.support.users import users_files  # noqa: F401, a fixture

ROOT = Path(__file__).parents[1]
MERGING = (ROOT / "docs" / "merging.md").read_text(encoding="utf-8")


def shown(value):
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return value if isinstance(value, str) else f"{value:g}"


@pytest.mark.parametrize("name", METHODS)
def test_the_guide_has_each_method_with_its_parameters(name):
    line = next((row for row in MERGING.splitlines() if row.startswith(f"| `{name}` |")), None)
    assert line is not None
    if "| as `" in line:  # said once for a pair of methods
        assert re.search(r"as `(\w+)`", line)[1] in METHODS
        return
    for parameter in METHODS[name].parameters.values():
        default = "required" if parameter.required else re.escape(shown(parameter.default))
        default = default.replace("1e\\-05", "1e-5").replace("1e\\-08", "1e-8")
        assert re.search(rf"`{parameter.name}` (\*per model\* )?\({default}\)", line), (
            name,
            parameter.name,
        )


@pytest.mark.parametrize("name", CALIBRATED)
def test_the_guide_has_each_data_driven_method(name):
    assert re.search(rf"^\| `{re.escape(name)}` \|", MERGING, re.M)


@pytest.mark.parametrize("impl", ["eager", "stream"])
@pytest.mark.parametrize("name", METHODS)
def test_the_numerics_page_has_each_method(name, impl):
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for dtype in ("float32", "bfloat16"):
        assert f"| `{name}` | {impl} | {dtype} |" in page


def test_recipes_in_the_examples_load():
    recipes = sorted((ROOT / "examples" / "recipes").glob("*.yml"))
    assert recipes
    for path in recipes:
        assert load_recipe(path).merge_method in METHODS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.package)
def test_the_reference_has_every_public_name(page):
    module = importlib.import_module(page.package)
    shown = re.findall(r"^::: ([\w.]+)$", text_of(page), re.M)
    assert {f"{page.package}.{name}" for name in module.__all__} <= set(shown)
    assert len(set(shown)) == len(shown)
    assert f"(reference/{page.guide}.md)" in (ROOT / "docs" / f"{page.guide}.md").read_text(
        encoding="utf-8"
    )
    assert f"reference/{page.guide}.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def literals(tree):
    """Every text in a module; a formatted value within one is an ellipsis."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [n.value if isinstance(n, ast.Constant) else "..." for n in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_on_the_page_of_questions_are_those_of_the_code():
    page = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(quoted) == 12
    said = "\n".join(
        text
        for path in (ROOT / "src").rglob("*.py")
        for text in literals(ast.parse(path.read_text(encoding="utf-8")))
    )
    for message in quoted:
        if message not in ("DeadRunError", "CUDA out of memory"):
            assert all(part.strip() in said for part in message.split("...")), message


def snippets_of(page):
    """The Python of a page, in its order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def test_every_snippet_of_the_readme_runs_as_it_stands(users_files):  # noqa: F811, the fixture
    """Each in a namespace of its own, with fewer steps."""
    snippets = snippets_of("README.md")
    assert len(snippets) == 7
    for code in snippets:
        exec(re.sub(r"max_steps=\d+", "max_steps=2", code), {})
    for made in ("merged", "masked", "smaller", "tuned/model"):
        generate = pipeline("text-generation", f"models/{made}", max_new_tokens=2)
        assert generate("w1 w2")[0]["generated_text"].startswith("w1 w2")


def test_the_page_of_modules_runs_as_it_stands():
    """Each snippet in a namespace of its own, and what it claims is so."""
    snippets = snippets_of("docs/modules.md")
    assert len(snippets) == 8
    found = []
    for code in snippets:
        namespace = {}
        exec(code, namespace)
        found.append(namespace)
    _, masks, efficient, smaller, lora, pairwise, thinking, inside = found
    assert masks["loss"] < 1e-6
    shares = masks["layer"].mask("weight")[0, :, 0]
    torch.testing.assert_close(shares, torch.tensor([1.0] * 4 + [0.0] * 4), atol=1e-3, rtol=0)
    assert torch.equal(masks["plain"](masks["x"]), masks["layer"](masks["x"]))
    assert efficient["loss"] < 1e-3
    x, target = smaller["x"], smaller["target"]
    errors = [(smaller[n](x) - target).norm() for n in ("fitted", "nearest", "low_rank")]
    assert min(errors) == errors[0]
    assert all(smaller[name].compression <= 0.5 for name in ("fitted", "nearest"))
    torch.testing.assert_close(smaller["plain"](x), smaller["fitted"](x), rtol=1e-4, atol=1e-4)
    assert type(lora["model"][2]) is torch.nn.Linear
    right = pairwise["head"](pairwise["a"], pairwise["b"]).argmax(1) == pairwise["labels"]
    assert right.float().mean() > 0.9
    assert thinking["model"](**thinking["rows"], n_step=3).loss < 0.1
    assert inside["result"].logits.shape == (4, 1, 8)


def test_the_page_of_tests_runs_as_it_stands(tmp_path):
    """In a process of its own, since modules are pickled by the name of their file."""
    program = "\n".join(snippets_of("docs/testing.md"))
    first, rest = program.split("from model_components.testing import check_equivalent", 1)
    checks = """
assert set(report.wrong) == {"gradients", "gradient_penalty", "changed_before_backward"}, report
"""
    after = """
assert set(report.raised) == {"forward_mode", "jacobians"} and not report.wrong, report
"""
    (tmp_path / "page.py").write_text(
        first + checks + "from model_components.testing import check_equivalent" + rest + after
    )
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gradient of x in torch.float32" in done.stdout


GRANULARITIES = ("scalar", "input", "output", "element")
MASKED = [
    "blend",
    "masked_embedding",
    "masked_kl",
    "masked_linear accurate",
    "masked_linear efficient",
]
MASK_ROWS = [
    (op, g, "eager", d) for op in MASKED for g in GRANULARITIES for d in ("float32", "bfloat16")
]
# there is no such thing
MASK_ROWS = [row for row in MASK_ROWS if row[:2] != ("masked_linear efficient", "element")]
FUSED = ["blend", "masked_embedding", "masked_linear accurate"]
MASK_ROWS += [(op, g, "fused", "float32") for op in FUSED for g in GRANULARITIES]


def test_the_guide_to_masks_has_every_field():
    import dataclasses

    from mergekit_lite import masks

    guide = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
    for config in (masks.MaskConfig, masks.KLConfig):
        for field in dataclasses.fields(config):
            assert f"`{field.name}`" in guide or field.name in ("seed", "shares"), field.name


KRONECKER_ROWS = [
    (f"kron_linear, {o}", "eager", d)
    for o in ("b_first", "a_first", "rebuild")
    for d in ("float32", "bfloat16")
]
KRONECKER_ROWS += [(op, "eager", "float32") for op in ("van_loan", "prune", "als", "to_linear")]
KRONECKER_ROWS += [(op, "eager", "float32") for op in ("low_rank_linear", "low_rank_embedding")]
KRONECKER_ROWS += [("fold", "stock checkpoint", d) for d in ("float32", "bfloat16")]


def test_the_guide_to_kronecker_has_every_preset_and_start():
    import kronecker
    from kronecker.config import Init

    guide = (ROOT / "docs" / "kronecker.md").read_text(encoding="utf-8")
    assert all(f"`{name}` " in guide for name in kronecker.PRESETS)
    assert all(f'`"{name}"`' in guide for name in get_args(Init))
    # the starts that were measured
    assert len(re.findall(r"^\| (half|quarter),", guide, re.M)) == 4


@pytest.mark.filterwarnings("ignore")
def test_the_snippets_about_smaller_models_run(tmp_path, monkeypatch):
    """The guide's in order in one namespace, on a small model with a text made for it, with few
    tokens and steps."""
    monkeypatch.chdir(tmp_path)
    words = [f"w{i}" for i in range(96)]
    tiny("llama").save_pretrained("models/llama")
    save_tokenizer(Path("models/llama"), words)
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(0, 96, (3000,), generator=generator).tolist()
    Path("texts.json").write_text(json.dumps([" ".join(words[i] for i in picked)]))
    guide = (ROOT / "docs" / "kronecker.md").read_text(encoding="utf-8")
    snippets, namespace = re.findall(r"```python\n(.*?)```", guide, re.S), {}
    assert len(snippets) == 5
    for code in snippets:
        code = (
            code.replace("50_000", "1_000")
            .replace("5_000", "300")
            .replace("context=256", "context=32")
        )
        code = re.sub(
            r"max_steps=\d+", 'max_steps=2, report_to="none", use_cpu=True', code
        ).replace("bf16=True", "bf16=False")
        exec(code, namespace)
    assert namespace["report"].after > 0
    assert Path("models/trained/config.json").exists()


THINKER_ROWS = [("think", impl, d) for impl in ("eager", "plan") for d in ("float32", "bfloat16")]
THINKER_ROWS += [("think", "early exit", "float32"), ("think", "carry", "float32")]
THINKER_ROWS += [("ThinkerTrainer", "resumed", "float32")]


LORA_CASES = [
    f"lora_linear{c}{b}{d}"
    for c in ("", ", Conv1D")
    for b in ("", ", bias")
    for d in ("", ", dropout")
]
LORA_ROWS = [
    (op, impl, dtype)
    for op in LORA_CASES
    for impl, dtypes in (("eager", ("float32", "bfloat16", "float16")),)
    for dtype in dtypes
]
LORA_ROWS += [("accelerate_lora_", "eager", dtype) for dtype in ("float32", "bfloat16")]


PAIRWISE_ROWS = [
    ("packed_attention", "eager", dtype) for dtype in ("float32", "bfloat16", "float16")
]
PAIRWISE_ROWS += [
    (link, "eager", dtype) for link in ("davidson",) for dtype in ("float32", "bfloat16")
]
PAIRWISE_ROWS += [
    (f"Pool, {kind}", "eager", "float32") for kind in ("mean", "first", "last", "last, mean")
]
PAIRWISE_ROWS += [(f"encoder, {kind}", "packed", "float32") for kind in (*PACKED, *DECODERS)]
PAIRWISE_ROWS += [(f"encoder, {kind}", "padded", "float32") for kind in PADDED]

JUDGED = [(f"{op}, {granularity}", impl, dtype) for op, granularity, impl, dtype in MASK_ROWS]
JUDGED += KRONECKER_ROWS + THINKER_ROWS + LORA_ROWS + PAIRWISE_ROWS


@pytest.mark.parametrize(("op", "impl", "dtype"), JUDGED)
def test_the_numerics_page_has_each_operation(op, impl, dtype):
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert f"| `{op}` | {impl} | {dtype} |" in page


def test_guide_and_reference_of_thinking_have_every_task_choice_and_class():
    import dataclasses

    import thinker
    from thinker import config

    guide = (ROOT / "docs" / "thinker_parts.md").read_text(encoding="utf-8")
    reference = text_of(next(page for page in PAGES if page.package == "thinker"))
    modules = (
        thinker.flow,
        thinker.losses,
        thinker.report,
        thinker.schedules,
        thinker.state,
        thinker.training,
    )
    for module in modules:
        for name, value in vars(module).items():
            if (
                inspect.isclass(value)
                and value.__module__.startswith(module.__name__)
                and not name.startswith("_")
            ):
                shown = name in thinker.__all__ or f"::: {module.__name__}.{name}\n" in reference
                assert shown or name in ("Pass",), f"{module.__name__}.{name}"
    for name, task in thinker.TASKS.items():
        assert f"`{name}`" in guide
        assert all(f"`{f.name}`" in guide for f in dataclasses.fields(task)), name
    for kinds in (config.Positions, config.LatentInit, config.MemoryKind, config.StepUpdate):
        assert all(f'`"{kind}"`' in guide for kind in get_args(kinds)), kinds
    for kind in (
        *thinker.schedules.Schedule.__subclasses__(),
        *thinker.losses.StepLoss.__subclasses__(),
    ):
        assert f"`{kind.__name__}`" in guide
    results = json.loads(
        (ROOT / "tests" / "benchmarks" / "results" / "thinker_accuracy.json").read_text()
    )
    measured = (ROOT / "docs" / "thinker_measured.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in measured for name in results["rows"])


def test_the_snippets_about_thinking_run(tmp_path, monkeypatch):
    """In the order of the pages, in one namespace, with fewer steps."""
    import thinker

    monkeypatch.chdir(tmp_path)
    snippets = snippets_of("docs/thinker.md") + snippets_of("docs/thinker_parts.md")
    found = [
        code
        for code in snippets
        if re.search(r"th\.|model\.", code)
        and not re.search("kronecker|mergekit_lite|from heads", code)
    ]
    assert len(found) == 10
    namespace = {}
    try:
        for code in found:
            code = re.sub(r"max_steps=\d+", "max_steps=2", code).replace(
                "save_steps=500", "save_steps=2"
            )
            # an export traces every step
            code = code.replace("n_step=16)", "n_step=2)")
            exec(code.replace('"runs/plan")', '"runs/plan", max_steps=2)'), namespace)
    finally:
        thinker.TASKS.pop("double", None)
    assert namespace["trainer"]


def test_the_snippets_about_lora_run(tmp_path, monkeypatch):
    """In order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    snippets = snippets_of("docs/lora.md")
    assert len(snippets) == 6
    namespace = {}
    for code in snippets:
        exec(code, namespace)
    assert namespace["report"].accelerated
    assert callable(namespace["api_judge"])
    assert (tmp_path / "runs" / "merged" / "model.safetensors").exists()


def test_the_guide_to_pairs_has_every_link_and_pooling():
    from heads.pairwise import config

    guide = (ROOT / "docs" / "pairwise.md").read_text(encoding="utf-8")
    told = (config.Link, config.Pooling, config.Surface)
    assert all(f"`{kind}`" in guide for kinds in told for kind in get_args(kinds))


def test_the_snippets_about_pairs_run(tmp_path, monkeypatch):
    """In order, in one namespace, with an encoder made for them."""
    from tests.heads.pairwise.support import tokenizer_of
    from tests.support.models import tiny

    monkeypatch.chdir(tmp_path)
    tiny("bert").save_pretrained("models/encoder")
    tokenizer_of().save_pretrained("models/encoder")
    snippets = snippets_of("docs/pairwise.md")
    assert len(snippets) == 3
    rows = [
        {"prompt": "Name a tool.", "a": "An axe.", "b": f"A saw {n}.", "label": n % 3}
        for n in range(6)
    ]
    Path("own_pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    namespace = {}
    for code in snippets:
        exec(code, namespace)
    assert sorted(namespace["best"].order) == [0, 1, 2]
    assert Path("runs/own_judge/model.safetensors").is_file()


def test_the_readme_example_of_the_guide_registers_and_merges(tmp_path):
    """The user-defined method of the guide, as printed there."""
    from mergekit_lite import merge_models

    code = re.search(
        r"```python\n(import torch\nfrom mergekit_lite import PerModel.*?)```", MERGING, re.S
    )[1]
    models = {"model_a": {"w": torch.randn(4, 3)}, "model_b": {"w": torch.randn(4, 3)}}
    try:
        exec(code.replace('out="out"', f"out={str(tmp_path / 'o')!r}, progress=False"), models)
        merged = merge_models(
            [models["model_a"], models["model_b"]], "soft_vote", sharpness=2.0, progress=False
        )
        assert merged["w"].shape == (4, 3)
    finally:
        METHODS.pop("soft_vote", None)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_it_found(name):
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))  # run from the first to the last
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(
        output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
    )
    first = "".join(notebook["cells"][0]["source"])
    assert re.match(r"# .*\?\n", first)  # a question


def test_examples_of_docstrings_are_code_on_the_site():
    """In Markdown, a prompt would begin a quotation."""
    pytest.importorskip("griffe", reason="griffe is in the docs extra")
    from tests.support.doctests import fenced

    text = "Add.\n\n>>> 1 + 1\n2\n\nMore."
    assert fenced(text) == "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
