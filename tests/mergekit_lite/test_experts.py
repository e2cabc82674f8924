"""Mixtures of experts: a matrix for each expert in the files, or one stack, give one result."""

import itertools
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist

from mergekit_lite import extract_lora, load_recipe, merge_models
from mergekit_lite.files import DictSource
from mergekit_lite.files.experts import RENAMED, STACKS, UNGATED, with_new_name
from tests.mergekit_lite.cases import CASES
from tests.support.models import tiny

KINDS = ("mixtral", "nemotron-h", "qwen3-moe")


def model_of(kind, seed):
    if kind != "qwen3-moe":
        return tiny(kind, seed)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3MoeConfig(
        vocab_size=50, num_hidden_layers=2, num_experts=3, num_experts_per_tok=2, **sizes, **heads
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four models of each kind, each written twice: with experts apart, and stacked."""
    found = {}
    for kind in KINDS:
        for seed in range(4):
            model = model_of(kind, seed)
            for layout in ("apart", "stacked"):
                folder = tmp_path_factory.mktemp("models") / f"{kind}-{seed}-{layout}"
                model.save_pretrained(folder, save_original_format=layout == "apart")
                found[kind, seed, layout] = str(folder)
    return found


def names_in(folder):
    return set(load_file(f"{folder}/model.safetensors"))


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def merged(case, paths, out):
    """The merge of a case of the conformance tests."""
    merge_models(
        paths[: case.models],
        case.method,
        base_model=paths[-1] if case.base else None,
        out=out,
        progress=False,
        **case.parameters,
    )
    return loaded(out)


def test_the_two_layouts_are_two(folders):
    for kind in KINDS:
        apart, stacked = (names_in(folders[kind, 0, layout]) for layout in ("apart", "stacked"))
        assert any(".experts.0." in name for name in apart)
        assert not any(".experts.0." in name for name in stacked)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_gives_the_same_bits_for_both_layouts(case, folders, tmp_path):
    if case.models > 3:
        pytest.skip("four models")
    results = []
    for layouts in (("apart",) * 4, ("stacked",) * 4, ("apart", "stacked", "apart", "stacked")):
        paths = [folders["mixtral", seed, layout] for seed, layout in enumerate(layouts)]
        out = tmp_path / "-".join(layouts)
        results.append(merged(case, paths, out))
        assert names_in(out) == names_in(paths[0])  # the first model's layout
    for other in results[1:]:
        assert results[0].keys() == other.keys()
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ties", "model_stock"])
def test_files_modules_and_shards_of_every_kind(kind, method, folders, tmp_path):
    apart = [folders[kind, seed, "apart"] for seed in range(3)]
    options = {"base_model": apart[2], "progress": False}
    if method == "ties":
        options |= {"density": 0.5, "weight": [1.0, 1.0]}
    modules = [AutoModelForCausalLM.from_pretrained(path) for path in apart[:2]]
    state = merge_models(modules, method, **options)
    memory = merge_models(apart[:2], method, **options)
    merge_models(apart[:2], method, out=tmp_path / "out", max_shard_size=20_000, **options)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(memory) == names_in(apart[0])
    result = loaded(tmp_path / "out")
    assert set(state) <= set(result)
    for name, value in state.items():
        assert torch.equal(value, result[name]), name


def test_slices_move_experts(folders, tmp_path):
    apart, stacked = (folders["qwen3-moe", 0, layout] for layout in ("apart", "stacked"))
    results = []
    for path in (apart, stacked):
        first = {"sources": [{"model": path, "layer_range": [1, 2]}]}
        second = {"sources": [{"model": path, "layer_range": [0, 2]}]}
        recipe = {"merge_method": "passthrough", "slices": [first, second]}
        out = tmp_path / path.rpartition("-")[2]
        merge_models(load_recipe(json.dumps(recipe)), out=out, progress=False)
        results.append(loaded(out))
    assert "model.layers.2.mlp.experts.1.up_proj.weight" in names_in(tmp_path / "apart")
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_an_incomplete_stack_is_named_by_what_is_in_the_file(folders, tmp_path):
    path = folders["qwen3-moe", 0, "apart"]
    state = load_file(f"{path}/model.safetensors")
    missing = "model.layers.0.mlp.experts.1.up_proj.weight"
    del state[missing]
    config = json.loads((Path(path) / "config.json").read_text())
    broken = DictSource(state, "broken", config)
    with pytest.raises(ValueError, match=r"broken: expected the tensors of .*gate_up_proj"):
        merge_models([path, broken], "linear", progress=False)


RECIPES = {
    "linear": "parameters: {weight: 0.5}",
    "slerp": "parameters: {t: 0.3}",
    "ties": "parameters: {weight: 1.0, density: 0.5}",
    "model_stock": "",
    "task_arithmetic": "parameters: {weight: 0.5}",
}


@pytest.mark.peers
@pytest.mark.parametrize("layout", ["apart", "stacked"])
@pytest.mark.parametrize("method", RECIPES)
def test_both_layouts_are_mergekit_s_merge(method, layout, folders, tmp_path):
    pytest.importorskip("mergekit", reason="mergekit is in the bench extra")
    from tests.mergekit_lite.peers import dialect

    base, *tuned = (folders["mixtral", seed, layout] for seed in range(3))
    models = [base, tuned[0]] if method == "slerp" else tuned
    text = f"merge_method: {method}\ndtype: float32\n{RECIPES[method]}\nmodels:\n"
    text += "".join(f"- model: {path}\n" for path in models)
    if method != "linear":
        text += f"base_model: {base}\n"
    results = []
    for name, run in (("ours", dialect.ours), ("theirs", dialect.mergekits)):
        run(text, tmp_path / name)
        results.append(loaded(tmp_path / name))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=2e-6)


# files of these families differ in more than the names of experts: both layouts merge alike, a mix of
# both is refused
UNMIXED = {
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_ocr2",
    "deepseek_v4",
    "dots3_note_vision_encoder",
    "glm5_next",
    "glm5_next_text",
    "hy_v3",
    "kimi_k25",
    "kimi_linear",
    "kolibri1",
    "minimax_m3_vl",
    "mistral_large4_text",
    "qwen3_5_moe_text",
    "qwen4_exp_text",
}


def test_the_stacks_of_every_family_are_transformers_own():
    """The same stacks, of the same parts, in the same order; and the same names beside."""
    unlisted = set()
    for model_type in CONFIG_MAPPING:
        stacks = {}
        renamed = []
        for step in get_checkpoint_conversion_mapping(model_type) or []:
            kinds = [(type(o), getattr(o, "dim", None)) for o in getattr(step, "operations", [])]
            sources = [p.rpartition("*.")[2].removesuffix(".weight") for p in step.source_patterns]
            if kinds and kinds[0][0] is MergeModulelist:
                assert kinds == [(MergeModulelist, 0), (Concatenate, 1)][: len(sources)]
                stacks[tuple(sources)] = step.target_patterns[0].rpartition(".")[2]
            elif not kinds:
                renamed.append((step.source_patterns[0], step.target_patterns[0]))
        if model_type in RENAMED and not stacks:
            found = [(before.replace("\\", ""), after) for before, after in renamed]
            assert list(RENAMED[model_type]) == found
        if not stacks:
            continue
        known = UNGATED if ("up_proj",) in stacks else STACKS
        assert stacks.items() <= known.items(), model_type
        if model_type in RENAMED:
            for before, after in renamed:
                assert with_new_name(before, RENAMED[model_type]) == after, model_type
            assert len(RENAMED[model_type]) <= len(renamed), model_type
        elif renamed:
            unlisted.add(model_type)
    # one more version of transformers may have fewer or more of them
    assert unlisted <= UNMIXED, "a family that mixes only with an entry in RENAMED"


@pytest.mark.parametrize("case", ["dtypes", "no config"])
def test_stacks_are_found_without_a_family_and_with_two_dtypes(case, folders, tmp_path):
    """Of a state dict without a config, and of experts stored in two dtypes."""
    results = []
    for layout in ("apart", "stacked"):
        models = []
        for seed in range(3):
            path = folders["qwen3-moe", seed, layout]
            state = load_file(f"{path}/model.safetensors")
            config = {}
            if case == "dtypes":
                config = json.loads((Path(path) / "config.json").read_text())
                if layout == "apart":
                    name = "model.layers.1.mlp.experts.1.down_proj.weight"
                    state[name] = state[name].double()
                else:
                    name = "model.layers.1.mlp.experts.down_proj"
                    state[name] = state[name].double()
            models.append(DictSource(state, f"{seed}", config))
        merged = merge_models(
            models[:2], "ties", base_model=models[2], density=0.5, weight=1.0, progress=False
        )
        results.append(merged)
    apart, stacked = results
    for layer in range(2):
        for matrix in ("down_proj", "gate_up_proj"):
            whole = stacked[f"model.layers.{layer}.mlp.experts.{matrix}"]
            for number in range(3):
                before = f"model.layers.{layer}.mlp.experts.{number}."
                if matrix == "down_proj":
                    part = apart[f"{before}down_proj.weight"]
                else:
                    part = torch.cat(
                        [apart[f"{before}{name}.weight"] for name in ("gate_proj", "up_proj")]
                    )
                assert torch.equal(part.double(), whole[number].double())


@pytest.mark.parametrize("layout", ["apart", "stacked"])
def test_an_adapter_with_the_names_of_transformers_fits_older_files(layout, folders, tmp_path):
    """peft calls Nemotron-H's layers ``model.layers``, and files of the hub ``backbone.layers``."""
    folder = folders["nemotron-h", 1, layout]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    options = {"out": tmp_path / "out", "progress": False}
    merge_models([f"{folder}+{tmp_path / 'adapter'}"], "passthrough", **options)
    result = loaded(tmp_path / "out")
    for name, value in wrapped.merge_and_unload().state_dict().items():
        torch.testing.assert_close(result[name], value, rtol=1e-6, atol=1e-7)


def test_factors_of_single_experts_fit_stacks_too(folders, tmp_path):
    """As transformers 4 trained them; merged into both layouts, and compared with the products."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    before = load_file(f"{folders['mixtral', 0, 'apart']}/model.safetensors")
    generator = torch.Generator().manual_seed(0)
    factors = {}
    expected = {}
    for layer, expert, matrix in itertools.product(range(2), range(3), ("w1", "w2", "w3")):
        module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}"
        rows, columns = before[f"{module}.weight"].shape
        down = torch.randn(2, columns, generator=generator)
        up = torch.randn(rows, 2, generator=generator)
        factors[f"base_model.model.{module}.lora_A.weight"] = down
        factors[f"base_model.model.{module}.lora_B.weight"] = up
        expected[f"{module}.weight"] = before[f"{module}.weight"] + up @ down
    save_file(factors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["w1", "w2", "w3"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    results = []
    for layout in ("apart", "stacked"):
        out = tmp_path / layout
        model = f"{folders['mixtral', 0, layout]}+{adapter}"
        merge_models([model], "passthrough", out=out, progress=False)
        results.append(loaded(out))
    stored = load_file(tmp_path / "apart" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-5, atol=1e-6)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["apart", "stacked"])
def test_an_adapter_extracted_from_experts_loads_in_peft(layout, folders, tmp_path):
    """The router has fewer rows than the rank, so its factors have a smaller rank."""
    paths = [folders["mixtral", seed, layout] for seed in (0, 1)]
    extract_lora(paths[1], paths[0], tmp_path / "adapter", rank=32, progress=False)
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    result = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    expected = loaded(paths[1])
    # stacks are not matrices, so no adapter is extracted from them
    changed = [n for n in expected if "gate.weight" in n or ("experts" in n and layout == "apart")]
    assert changed
    for name in changed:
        value = result.state_dict()[name]
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_an_expert_that_is_no_matrix_is_no_part_of_a_stack():
    names = [f"l.experts.{i}.w2.weight" for i in range(2)]
    states = [{name: torch.full((4,), value) for name in names} for value in (1.0, 3.0)]
    merged = merge_models(states, "linear", weight=0.5, progress=False)
    assert {name: value.tolist() for name, value in merged.items()} == dict.fromkeys(
        names, [2.0] * 4
    )
