"""Texts as users have them: what is taken, and what is refused with a word on what was meant."""

import pytest
import torch

from kronecker import LowRankConfig, PruneConfig, convert_, prune_, text_batches, text_of
from kronecker.data.batches import tokens_seen
from tests.support.models import tiny


def test_a_name_of_a_file_is_not_its_text(tmp_path):
    (tmp_path / "text.txt").write_text("words")
    with pytest.raises(ValueError, match=r"text_batches:.*name of a file"):
        text_batches(str(tmp_path / "text.txt"), lambda t: [1] * len(t), tokens=8)
    with pytest.raises(ValueError, match="text_batches: text is a list, expected one string"):
        text_batches(["words"], lambda t: [1] * len(t), tokens=8)


@pytest.mark.parametrize("encode", [lambda t: {"input_ids": [1, 2]}, lambda t: torch.ones(4)])
def test_a_tokenizer_itself_is_not_its_encode(encode):
    with pytest.raises(ValueError, match=r"text_batches:.*token"):
        text_batches("some words", encode, tokens=8)


@pytest.mark.parametrize("call", [prune_, convert_])
def test_a_folder_is_not_a_model(call):
    with pytest.raises(ValueError, match="model is a str, expected a loaded model"):
        call("models/llama", PruneConfig(), calibration=[torch.ones(1, 4, dtype=torch.long)])


def test_a_vision_model_says_what_it_reads():
    from transformers import ViTConfig, ViTModel

    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = ViTModel(ViTConfig(**sizes, intermediate_size=16))
    with pytest.raises(ValueError, match=r"prune_:.*\['input_ids'\].*'pixel_values'.*ViTModel"):
        prune_(model, PruneConfig(), calibration=[torch.ones(1, 4, dtype=torch.long)])


@pytest.mark.parametrize(
    ("change", "config"), [(prune_, PruneConfig()), (convert_, LowRankConfig())]
)
def test_reports_say_on_how_many_tokens_errors_are_measured_and_whether_that_is_few(change, config):
    for tokens, few in ((8, True), (200, False)):
        ids = torch.randint(0, 96, (1, tokens), generator=torch.Generator().manual_seed(0))
        report = change(
            tiny("llama"),
            config,
            calibration=[ids[:, :64]] * (tokens // 64 or 1),
            progress=False,
        )
        count = min(tokens, 64) * (tokens // 64 or 1)
        assert f"errors are measured on the {count} calibration tokens" in str(report)
        assert ("per unknown of a fit; use" in str(report)) == few
    mask = torch.tensor([[1, 1, 0]])
    assert "the 2 calibration" in tokens_seen([{"input_ids": mask, "attention_mask": mask}], 1)[0]
    assert tokens_seen([{"pixel_values": mask}], 1) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"method": "blocks", "keep": 0.9}, "blocks"), ({"multiple_of": 512}, "neurons")],
)
def test_what_would_leave_all_as_it_is_is_refused(fields, what):
    with pytest.raises(ValueError, match=rf"prune_: a keep of .* would keep all \d+ {what}"):
        prune_(
            tiny("llama"),
            PruneConfig(**fields),
            calibration=[torch.ones(1, 8, dtype=torch.long)],
            progress=False,
        )


def test_what_is_no_text_is_refused_and_marks_are_read(tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße".encode("utf-16"))
    assert text_of(tmp_path / "a.txt") == "Grüße"
    for held in (bytes(range(256)) * 20, b"\xe9" * 50):
        (tmp_path / "b.txt").write_bytes(held)
        with pytest.raises(ValueError, match=r"text_of:.*b\.txt.*utf-8"):
            text_of(tmp_path / "b.txt")
    (tmp_path / "c.JSON").write_text('[{"text": "x"}]')
    assert text_of(tmp_path / "c.JSON") == "x"
    (tmp_path / "d.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"text_of:.*JSON"):
        text_of(tmp_path / "d.json")
    (tmp_path / "e.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n{"text":')
    with pytest.raises(ValueError, match=r"text_of:.*e\.jsonl.*4"):
        text_of(tmp_path / "e.jsonl")


def test_long_words_are_read_until_there_are_enough():
    text = " ".join("x" * 60 for _ in range(5000))
    rows = text_batches(text, lambda part: [len(w) for w in part.split()], tokens=1000, context=10)
    assert sum(row.numel() for row in rows) == 1000
    assert text_batches("漢字" * 60, lambda part: [ord(c) for c in part], tokens=50, context=10)


def test_half_of_a_surrogate_pair_is_read(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text('[{"text": "cut \\ud83d off"}]', encoding="utf-8")
    text = text_of(path)
    assert text.startswith("cut ")
    assert len(text_batches(text, lambda part: [ord(c) for c in part], tokens=4, context=4)) == 1


def test_a_last_token_is_no_half_word():
    def encode(part):
        return [len(word) for word in part.split()]

    (batch,) = text_batches("a" * 39 + " " + "b" * 30 + " c", encode, tokens=2, context=2)
    assert batch.tolist() == [[39, 30]]
