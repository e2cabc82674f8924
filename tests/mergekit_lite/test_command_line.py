"""The command line, in fresh processes; and what importing costs."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from mergekit_lite.__main__ import main
from tests.support.models import save, tiny


@pytest.fixture
def recipe(tmp_path):
    paths = [save(tiny("llama", i), tmp_path / str(i), torch.bfloat16) for i in range(3)]
    (tmp_path / "r.yml").write_text(f"""
merge_method: dare_ties
base_model: {paths[0]}
models:
- {{model: {paths[1]}, parameters: {{weight: 0.5}}}}
- {{model: {paths[2]}, parameters: {{weight: 0.25}}}}
parameters: {{density: 0.5}}
""")
    return tmp_path / "r.yml"


def test_plan_and_merge(recipe, tmp_path, capsys):
    assert main(["plan", str(recipe)]) == 0
    printed = capsys.readouterr().out
    assert "dare_ties of 2" in printed
    assert (
        main(
            [
                "merge",
                str(recipe),
                str(tmp_path / "out"),
                "--no-progress",
                "--max-shard-size",
                "10kB",
            ]
        )
        == 0
    )
    assert "peak" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert main(["merge", str(recipe), str(tmp_path / "out")]) == 1
    assert "not empty" in capsys.readouterr().err
    recipe.write_text("merge_method: tyes\nmodels: [a]")
    assert main(["plan", str(recipe)]) == 1
    assert "did you mean ties" in capsys.readouterr().err


def test_a_passthrough_moves_bytes_without_kernels(recipe, tmp_path):
    (tmp_path / "p.yml").write_text(f"merge_method: passthrough\nmodels: [{tmp_path}/1]\n")
    words = ["merge", str(tmp_path / "p.yml"), str(tmp_path / "out"), "--no-progress"]
    code = f"""
import sys
from mergekit_lite.__main__ import main
assert main({words!r}) == 0
print([name for name in ("numba", "torch") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    stored = load_file(tmp_path / "1" / "model.safetensors")
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value, stored[name])


def test_mergekit_s_flags_are_taken(recipe, tmp_path, capsys):
    flags = "--copy-tokenizer --lazy-unpickle --allow-crimes --out-shard-size 10K --random-seed=3"
    flags += " --low-cpu-memory --lora-merge-cache cache --no-cuda --no-clone-tensors -v --quiet"
    assert main(["merge", str(recipe), str(tmp_path / "theirs"), *flags.split()]) == 0
    printed = capsys.readouterr().err
    notes = [line for line in printed.splitlines() if "has no effect here" in line]
    assert [note.split()[1] for note in notes] == [
        "--copy-tokenizer",
        "--low-cpu-memory",
        "--lora-merge-cache",
        "-v",
    ]
    ours = ["--seed", "3", "--max-shard-size", "10kB", "--no-progress"]
    assert main(["merge", str(recipe), str(tmp_path / "ours"), *ours]) == 0
    for file in (tmp_path / "ours").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "theirs" / file.name).read_bytes()
    for size in ("large", "1.2.3", "."):
        assert main(["merge", str(recipe), str(tmp_path / "out"), "--out-shard-size", size]) != 0
        assert size in capsys.readouterr().err


def test_different_architectures_merge_if_they_are_allowed(recipe, tmp_path, capsys):
    config = tmp_path / "1" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    words = ["merge", str(recipe), str(tmp_path / "out"), "--no-progress"]
    assert main(words) == 1
    assert "different architectures: hidden_act" in capsys.readouterr().err
    assert main([*words, "--allow-crimes"]) == 0
    assert "note: different architectures: hidden_act" in capsys.readouterr().out


def environment():
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


LEAN = """
import sys
BLOCKED = "torch transformers peft accelerate triton matplotlib datasets safetensors einops".split()
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import mergekit_lite
"""


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )


def test_a_file_merge_imports_neither_torch_nor_transformers(recipe, tmp_path):
    arguments = ["merge", str(recipe), str(tmp_path / "o")]
    done = python(LEAN + f"from mergekit_lite.__main__ import main\nsys.exit(main({arguments}))")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "model.safetensors").exists()


def test_assertions_do_no_work(recipe, tmp_path):
    """python -O drops them, and must write the same bytes."""
    code = "import sys; from mergekit_lite.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for name, options in (("plain", []), ("optimized", ["-O"])):
        command = [
            sys.executable,
            *options,
            "-c",
            code,
            "merge",
            str(recipe),
            str(tmp_path / name),
            "--no-progress",
        ]
        assert subprocess.run(command, env=environment(), capture_output=True).returncode == 0
    left, right = (tmp_path / name / "model.safetensors" for name in ("plain", "optimized"))
    assert left.read_bytes() == right.read_bytes()


def test_the_public_names_exist_and_are_explained():
    import mergekit_lite
    import mergekit_lite.masks
    import mergekit_lite.methods

    for module in (mergekit_lite, mergekit_lite.methods, mergekit_lite.masks):
        names = list(module.__all__)
        assert all(hasattr(module, name) for name in names)
        assert all(
            (getattr(module, n).__doc__ or "").strip()
            for n in names
            if callable(getattr(module, n))
        )


def test_all_that_is_wrong_with_a_recipe_is_listed_at_once(tmp_path, capsys):
    (tmp_path / "r.yml").write_text("""
merge_method: tyes
models:
- {model: /nowhere/a, weight: 1, paramters: {}}
- {model: /nowhere/b, parameters: [1]}
dtype: float99
out_dtype: int3
tokenizer: {sourc: base}
""")
    for command in (["plan"], ["merge", str(tmp_path / "out")]):
        assert main([command[0], str(tmp_path / "r.yml"), *command[1:]]) == 1
        printed = capsys.readouterr().err
        for word in (
            "did you mean ties",
            "got weight next to model",
            "'paramters'",
            "models parameters: expected a mapping of names to values, got [1]",
            "/nowhere/a",
            "/nowhere/b",
            "recipe dtype",
            "recipe out_dtype",
            "'sourc'",
        ):
            assert word in printed
        assert "(9 problems)" in printed
    assert not (tmp_path / "out").exists()
