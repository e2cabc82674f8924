"""Ids of the hub, with revisions, wherever a model is named; and what is uploaded. A cache and a
hub of our own."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig

import thinker as th
from heads.lora import load_lora, prepare_lora
from kronecker import KroneckerConfig, convert_, from_pretrained, save_pretrained
from kronecker.loading import find_model
from kronecker.loading import load as load_for_command
from mergekit_lite import merge_models
from model_components._cli import main
from model_components._hub import find_folder, split_revision
from tests.heads.pairwise.support import model_of
from tests.support.hub import fake_hub
from tests.support.models import save, tiny

COMMIT = "0123456789" * 4


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Puts a folder into the hub's cache, under an id and a revision."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(folder, name, revision="main"):
        repository = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / revision).write_text(COMMIT)
        return f"{name}@{revision}"

    return put


def small():
    model = tiny("llama")
    convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"), progress=False)
    return model


def test_an_id_with_a_revision_is_found_in_the_cache(cache, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.json").write_text("{}")
    name = cache(tmp_path / "held", "me/model", "v1")
    assert (find_folder(name) / "config.json").is_file()
    assert find_folder("me/model", revision="v1") == find_folder(name)
    assert split_revision(name) == ("me/model", "v1")
    with pytest.raises(
        ValueError, match="me/model@v2: there is no such folder, and it cannot be downloaded"
    ):
        find_folder("me/model@v2")


def test_folders_are_no_ids(tmp_path):
    (tmp_path / "a@b").mkdir()
    assert find_folder(tmp_path / "a@b") == tmp_path / "a@b"
    assert find_folder(f"{tmp_path}@v1") == tmp_path
    assert split_revision(tmp_path / "a@b") == (str(tmp_path / "a@b"), None)
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match=r"modles:.*/models\?$"):
        find_folder(tmp_path / "modles")
    for name in ("./nowhere", "/no/where", "a b"):
        with pytest.raises(ValueError, match=r"there is no such folder$"):
            find_folder(name)


def test_every_package_takes_ids_with_revisions(cache, tmp_path, capsys):
    save_pretrained(small(), tmp_path / "small")
    name = cache(tmp_path / "small", "me/small", "v1")
    ids = torch.tensor([[1, 2, 3]])
    expected = from_pretrained(tmp_path / "small")(ids).logits
    assert torch.equal(from_pretrained(name)(ids).logits, expected)
    assert torch.equal(load_for_command(find_model(name))(ids).logits, expected)

    prepare_lora(tiny("llama"), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    assert load_lora(
        tiny("llama"), cache(tmp_path / "adapter", "me/adapter", "v2")
    ).active_adapters == ["default"]

    model = tiny("llama", 1)
    save(model, tmp_path / "model")
    merged = merge_models(
        [cache(tmp_path / "model", "me/model", "v3")], "passthrough", progress=False
    )
    assert torch.equal(merged["lm_head.weight"], model.lm_head.weight)

    model_of("bert").save_pretrained(tmp_path / "judge")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "w1", "a": "w2", "b": "w3"}))
    given = [
        cache(tmp_path / "judge", "me/judge", "v4"),
        str(tmp_path / "pairs.jsonl"),
        "--no-progress",
    ]
    assert main(["judge", "pairs", *given]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] in ("A", "B", "tie")


def test_compressed_models_and_thinkers_are_uploaded_whole(monkeypatch):
    task = th.CurriculumDataset(th.make_task("copy"), th.Frontier(max_length=4))
    models = {"me/small": small(), "me/thinker": th.LatentThinker(th.ThinkerConfig(**task.sizes()))}
    with fake_hub(monkeypatch) as hub:
        for name, model in models.items():
            model.push_to_hub(name)
    files = {name: set(held["files"]) for name, held in hub.repositories.items()}
    assert {"config.json", "kronecker.json", "model.safetensors"} <= files["me/small"]
    assert {"config.json", "model.safetensors"} <= files["me/thinker"]
