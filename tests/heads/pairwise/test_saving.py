"""Files of a judge: what is saved comes back, its card says what it is worth, and the hub gets
both."""

import json

import pytest
import torch
import yaml
from tests.heads.pairwise.support import model_of, pairs_of, tokenizer_of
from tests.support.hub import fake_hub
from tests.support.models import tiny
from transformers import ViTConfig, ViTModel

from heads.pairwise import PairwiseModel, pairwise_report


def report_of(model):
    data = model.dataset(pairs_of(60), progress=False)
    return pairwise_report(model, data, train=data.pairs, progress=False)


def head_of(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_carries_the_report(tmp_path):
    model = model_of(surface=["length"])
    model.config.encoder._name_or_path = "nreimers/MiniLM-L6"
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert head_of(card)["base_model"] == ["nreimers/MiniLM-L6"]
    assert "model-index" not in head_of(card)
    report = report_of(model)
    model.save_pretrained(tmp_path, report=report)
    card = (tmp_path / "README.md").read_text()
    assert str(report) in card
    assert "a curve of length" in card
    (result,) = head_of(card)["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "accuracy", "value": round(report.metrics.accuracy, 4)}
    loaded = PairwiseModel.from_pretrained(tmp_path)
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
    )


def test_a_card_of_yours_stays_and_no_folder_is_named(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    model = model_of()
    model.config.encoder._name_or_path = str(tmp_path)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    model.save_pretrained(tmp_path / "other")
    card = (tmp_path / "other" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "base_model" not in head_of(card)


def test_the_hub_gets_all_of_it(tmp_path, monkeypatch):
    model = model_of(link="davidson")
    report = report_of(model)
    with fake_hub(monkeypatch) as hub:
        said = model.push_to_hub(
            "me/judge",
            report=report,
            private=True,
            token="hf_x",
            revision="trial",
            commit_message="A judge",
        )
        assert said == "https://huggingface.co/me/judge/commit/1"
        model.push_to_hub("me/judge", token="hf_x")
    assert hub.branches == [("me/judge", "trial")]
    assert hub.commits == [
        ("me/judge", "trial", "A judge"),
        ("me/judge", "main", "Upload by model-components"),
    ]
    asked = hub.repositories["me/judge"]["asked"]
    assert asked.get("private") or asked.get("visibility") == "private"
    files = hub.repositories["me/judge"]["files"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = PairwiseModel.from_pretrained(tmp_path)
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
    )
    assert loaded.tokenizer is not None
    assert json.loads(files["config.json"])["link"] == "davidson"


def test_an_upload_that_would_leave_half_behind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"call model\.push_to_hub"):
        model_of().save_pretrained(tmp_path, push_to_hub=True)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "judge").write_text("")
    with pytest.raises(ValueError, match=r"save_pretrained.*judge"):
        model_of().save_pretrained(tmp_path / "judge")


def test_no_folder_of_this_machine_is_in_the_config(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    tiny("bert").save_pretrained("models/secret")
    tokenizer_of().save_pretrained("models/secret")
    for place in ("models/secret", str(tmp_path / "models" / "secret")):
        model = PairwiseModel.from_encoder(place)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        model.save_pretrained(tmp_path / "out")
        monkeypatch.chdir(tmp_path)
        for name in ("config.json", "README.md"):
            assert "secret" not in (tmp_path / "out" / name).read_text()
        (tmp_path / "out" / "README.md").unlink()


def test_a_link_in_the_place_of_the_card_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "out" / "README.md").symlink_to(tmp_path / "mine.txt")
    model = model_of()
    with pytest.raises(ValueError, match="a folder, link or device is there"):
        model.save_pretrained(tmp_path / "out", report=report_of(model))
    assert (tmp_path / "mine.txt").read_text() == "mine"
    (tmp_path / "mine.txt").unlink()
    model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "mine.txt").exists()


def test_a_damaged_tokenizer_is_not_no_tokenizer(tmp_path):
    model_of().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ValueError, match=r"from_pretrained:.*tokenizer"):
        PairwiseModel.from_pretrained(tmp_path)


def test_the_tokenizer_comes_from_where_the_model_does(tmp_path):
    model_of().save_pretrained(tmp_path / "judge")
    assert PairwiseModel.from_pretrained(tmp_path, subfolder="judge").tokenizer is not None


def test_a_truncated_judge_and_a_model_of_pictures_are_refused(tmp_path):
    model_of().save_pretrained(tmp_path / "judge")
    weights = tmp_path / "judge" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"from_pretrained: .*judge cannot be read"):
        PairwiseModel.from_pretrained(tmp_path / "judge")
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    with pytest.raises(
        ValueError, match="expected an encoder that computes hidden states of text, got ViTModel"
    ):
        PairwiseModel.from_encoder(ViTModel(config))
