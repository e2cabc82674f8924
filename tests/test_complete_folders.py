"""Whatever writes a model folder writes a complete one: a pipeline loads it, and its card says what
it was made from, and how."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, pipeline

import kronecker
from heads.lora import merge_lora, prepare_lora
from mergekit_lite import extract_lora, merge_adapters, merge_models
from mergekit_lite.masks import Merger
from model_components import push_to_hub
from model_components._cli import main
from model_components._formats import check_format
from model_components._hub import is_cached
from model_components._model_folders import license_of
from tests.support.hub import fake_hub
from tests.support.models import save_tokenizer, tiny

WORDS = ["<unk>", *(f"w{i}" for i in range(95))]
NEEDED = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def bases(tmp_path):
    """Two models with tokenizers and cards that name a license."""
    folders = [tmp_path / "private" / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        tiny("llama", seed).save_pretrained(folder)
        save_tokenizer(folder, WORDS)
        (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (tmp_path / "texts.txt").write_text(" ".join(WORDS[1:] * 9))
    return folders


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def merging(bases, out):
    merge_models([*map(str, bases)], "linear", weight=0.5, out=out, progress=False)


def baking(bases, out):
    Merger.from_pretrained([*map(str, bases)]).bake(out, progress=False)


def merging_lora(bases, out):
    merge_lora(prepare_lora(loaded(bases[0]), LoraConfig()), out, progress=False)


def pruning(bases, out):
    command = ["prune", str(bases[0]), str(out), "--calibration", "texts.txt"]
    assert main([*command, "--tokens", "200", "--context", "16"]) == 0


def smaller(base):
    model = loaded(base)
    config = kronecker.LowRankConfig(keep=0.5)
    batches = [torch.randint(3, 90, (4, 8))]
    kronecker.convert_(model, config, calibration=batches, progress=False)
    return model


def folding(bases, out):
    kronecker.fold(smaller(bases[0]), out)


WRITERS = [merging, baking, merging_lora, pruning, folding]


@pytest.mark.parametrize("write", WRITERS, ids=lambda writer: writer.__name__)
def test_a_pipeline_loads_it_and_its_card_tells(write, bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(bases, Path("out"))
    assert {path.name for path in Path("out").iterdir()} >= NEEDED
    shutil.rmtree(tmp_path / "private")  # it needs nothing but itself
    generate = pipeline("text-generation", "out", max_new_tokens=3, do_sample=False)
    assert generate("w1 w2")[0]["generated_text"].startswith("w1 w2")
    card = Path("out", "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["license"] == "mit"
    assert fields["library_name"] == "transformers"
    assert "model-components" in fields["tags"]
    assert "one" in text
    assert "```" in text
    assert "private" not in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("write", [merging, pruning], ids=lambda writer: writer.__name__)
def test_files_of_sentence_transformers_come_along(write, bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"models.{kind}"} for path, kind in paths.items()]
    (bases[0] / "modules.json").write_text(json.dumps(modules))
    (bases[0] / "1_Pooling").mkdir()
    (bases[0] / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    write(bases, Path("out"))
    assert Path("out", "1_Pooling", "config.json").is_file()
    assert Path("out", "modules.json").is_file()


@pytest.mark.parametrize(
    "modules",
    [
        '[{"path": "..", "type": "Pooling"}]',
        '[{"path": "../two", "type": "Pooling"}]',
        '[{"path": "1_Pooling", "type": "models.Transformer"}]',
        '[{"path": 3, "type": ""}]',
        '["odd"]',
        "3",
        "[damaged",
    ],
)
def test_modules_that_lead_elsewhere_are_not_copied(modules, bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (bases[0] / "modules.json").write_text(modules)
    (bases[0] / "1_Pooling").mkdir()
    (bases[0] / "1_Pooling" / "model.safetensors").write_text("weights of another model")
    (bases[0].parent / "beside.txt").write_text("not to be copied")
    merging(bases, Path("out"))
    assert not {"1_Pooling", "modules.json", "beside.txt"} & {p.name for p in Path("out").iterdir()}
    assert not Path("beside.txt").exists()


def test_a_compressed_model_is_complete_too(bases, tmp_path):
    kronecker.save_pretrained(smaller(bases[0]), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= NEEDED | {"kronecker.json"}
    assert kronecker.from_pretrained(tmp_path / "out").generation_config is not None


def test_licenses_that_differ_are_left_to_a_person(bases, tmp_path):
    (bases[1] / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    merging(bases, tmp_path / "out")
    assert "license" not in (tmp_path / "out" / "README.md").read_text()
    cards = ["# none", "---\n: [\n---\n", "---\nlicense: [a]\n---\n", "---\nday: 2020-13-77\n---\n"]
    for card in (*cards, f"---\n{'[' * 5000}\n---\n"):
        (bases[1] / "README.md").write_text(card)
        shutil.rmtree(tmp_path / "out")
        merging(bases, tmp_path / "out")
        assert "license" not in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_is_uploaded_whole(bases, tmp_path, monkeypatch):
    merging(bases, tmp_path / "out")
    with fake_hub(monkeypatch) as hub:
        said = push_to_hub(tmp_path / "out", "me/merged", private=True)
    assert said.endswith("me/merged/commit/1")
    made = hub.repositories["me/merged"]
    asked = made["asked"]
    assert asked.get("private") or asked.get("visibility") == "private"
    here = {path.name for path in (tmp_path / "out").iterdir()}
    assert here - set(made["files"]) == {"mergekit_config.yml", "merge_manifest.json"}
    assert json.loads(made["files"]["config.json"])["model_type"] == "llama"
    assert not [name for name, data in made["files"].items() if b"private" in data]


def test_an_adapter_has_a_card_and_its_base_is_one_that_others_have(bases, tmp_path, monkeypatch):
    out = tmp_path / "adapter"
    extract_lora(str(bases[1]), str(bases[0]), out, rank=2, progress=False)
    merge_adapters([out, out], "linear", weight=0.5, out=tmp_path / "both", progress=False)
    for folder in (out, tmp_path / "both"):  # peft loads the base that the adapter names
        generate = pipeline("text-generation", str(folder), max_new_tokens=3, do_sample=False)
        assert generate("w1 w2")[0]["generated_text"].startswith("w1 w2")
    for folder, call in ((out, "extract_lora('two', 'one', rank=2"), (tmp_path / "both", "merge_")):
        card = (folder / "README.md").read_text()
        assert call in card
        assert "library_name: peft" in card
        assert "private" not in card
    with pytest.raises(ValueError, match="expected a hub id as base_model_name_or_path"):
        push_to_hub(out, "me/adapter")
    config = json.loads((out / "adapter_config.json").read_text())
    for base in ("org/base", "gpt2"):
        named = config | {"base_model_name_or_path": base}
        (out / "adapter_config.json").write_text(json.dumps(named))
        with fake_hub(monkeypatch) as hub:
            push_to_hub(out, "me/adapter")
    assert set(hub.repositories["me/adapter"]["files"]) == {path.name for path in out.iterdir()}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_a_damaged_tokenizer_is_left_out(file, text, bases, tmp_path):
    (bases[0] / file).write_text(text)
    with pytest.warns(
        UserWarning, match="one: the tokenizer is left out, because it cannot be loaded"
    ):
        merging_lora(bases, tmp_path / "out")
    assert loaded(tmp_path / "out") is not None


def test_a_tokenizer_is_not_invented(bases, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny("gpt2").save_pretrained("bare")  # for which AutoTokenizer makes an empty one
    merge_lora(prepare_lora(loaded("bare"), LoraConfig()), "out", progress=False)
    assert not [path for path in Path("out").iterdir() if "token" in path.name]
    words = ["prune", "bare", "smaller", "--calibration", "texts.txt"]
    assert main(words) == 1
    assert "bare has no tokenizer, expected --tokenizer FOLDER" in capsys.readouterr().err


def test_the_card_of_a_folded_model_counts_its_own_parameters(bases, tmp_path):
    folding(bases, tmp_path / "out")
    count = sum(p.numel() for p in loaded(tmp_path / "out").parameters())
    assert f"{count:,} parameters" in (tmp_path / "out" / "README.md").read_text()


def test_settings_of_a_processor_go_along(bases, tmp_path):
    (bases[0] / "preprocessor_config.json").write_text('{"size": 3}')
    for write in (merging, merging_lora, folding):
        write(bases, tmp_path / write.__name__)
        copied = tmp_path / write.__name__ / "preprocessor_config.json"
        assert json.loads(copied.read_text()) == {"size": 3}


def test_a_relative_path_is_no_hub_id_in_another_folder(bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = loaded("private/one")
    monkeypatch.chdir(tmp_path / "private")
    merge_lora(prepare_lora(model, LoraConfig()), tmp_path / "out", progress=False)
    assert "private" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["./gone", "run--1/last", "ckpt-", "x..y", "a" * 97, "~/no"])
def test_a_name_that_is_no_id_of_the_hub_is_no_error(name):
    assert not is_cached(name)


def test_nothing_beneath_a_folder_names_this_machine(bases, tmp_path, monkeypatch):
    merging(bases, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "out" / "sub")
    with fake_hub(monkeypatch) as hub:
        push_to_hub(tmp_path / "out", "me/merged")
    files = hub.repositories["me/merged"]["files"]
    assert "sub/config.json" in files
    assert not [name for name, data in files.items() if b"private" in data]
    adapter = tmp_path / "out" / "sub" / "adapter_config.json"
    for text in ("[]", "{bad"):
        adapter.write_text(text)
        with pytest.raises(ValueError, match=r"expected a JSON object in .*adapter_config"):
            push_to_hub(tmp_path / "out", "me/merged")
    adapter.write_text(json.dumps({"base_model_name_or_path": str(bases[0])}))
    with pytest.raises(ValueError, match="expected a hub id as base_model_name_or_path"):
        push_to_hub(tmp_path / "out", "me/merged")


def test_a_model_made_in_memory_has_no_license(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("---\nlicense: mit\n---\n")
    assert license_of("") is None
    assert license_of(".") == "mit"


@pytest.mark.parametrize("version", [0, 2, 1.9, True, "one", None, "9" * 5000])
def test_a_version_that_is_none_is_refused(version):
    check_format({"format_version": "1"}, 1, "load")
    check_format({}, 1, "load")
    with pytest.raises(ValueError, match="load: expected format 1, got "):
        check_format({"format_version": version}, 1, "load")
    with pytest.raises(ValueError, match="load: expected a JSON object, got a list"):
        check_format([], 1, "load")


def test_a_newer_folder_is_refused_with_the_version_to_install(bases, tmp_path):
    kronecker.save_pretrained(smaller(bases[0]), tmp_path / "small")
    mark = tmp_path / "small" / "kronecker.json"
    newer = {"format_version": 9, "made_with": "4.5.6"}
    mark.write_text(json.dumps(json.loads(mark.read_text()) | newer))
    said = r'expected format 1, got 9; pip install "model-components>=4\.5\.6"'
    with pytest.raises(ValueError, match=said):
        kronecker.from_pretrained(tmp_path / "small")
    merger = Merger.from_pretrained([*map(str, bases)])
    masks = merger.save_masks(tmp_path / "masks.safetensors")
    with safe_open(masks, "pt") as file:
        metadata = file.metadata()
    stamped = {**metadata, "format_version": "9", "made_with": "4.5.6"}
    save_file(load_file(masks), masks, stamped)
    with pytest.raises(ValueError, match=said):
        merger.load_masks(masks)
