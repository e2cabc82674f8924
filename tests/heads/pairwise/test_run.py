"""`train_judge`: what it writes, what it holds out, and how it continues."""

import json
import shutil

import pytest
import torch
from tests.heads.pairwise.support import encoder_of, pairs_of, tokenizer_of
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    CLIPConfig,
    GPTNeoXJapaneseConfig,
    TrainerCallback,
)

from heads.pairwise import Pair, PairwiseModel, train_judge
from heads.pairwise.judge_config import JudgeConfig
from heads.pairwise.training.division import divide, without_few_ties
from heads.pairwise.training.run import PairwiseTrainer, _model
from model_components._cli import main

SHORT = {"epochs": 3, "batch_size": 16, "surface": ("length",), "progress": False}


@pytest.fixture
def encoder(tmp_path):
    encoder_of("bert").save_pretrained(tmp_path / "encoder")
    tokenizer_of().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def written(count=160, writers=8):
    """Pairs of several answering models, one of which all others meet."""
    found = []
    for number, pair in enumerate(pairs_of(count)):
        names = (f"m{number % writers}", "everywhere")
        found.append(Pair(*pair[:4], names if number % 2 else names[::-1]))
    return found


def test_few_ties_are_left_out(encoder, tmp_path):
    pairs = [pair._replace(label=pair.label % 2) for pair in written()]
    pairs[:3] = [pair._replace(label=2) for pair in pairs[:3]]
    pairs[3] = pairs[3]._replace(label=(0.5, 0.25, 0.25))
    found = {}
    for ties in ("auto", "drop", "keep"):
        out = tmp_path / ties
        report = train_judge(pairs, encoder, out=out, ties=ties, **SHORT)
        found[ties] = report.read
        judge = PairwiseModel.from_pretrained(out / "model")
        assert judge.config.num_classes == (3 if ties == "keep" else 2)
    left_out = "160 pairs\n3 ties left out (ties='keep' keeps them)"
    assert found == {"auto": left_out, "drop": left_out, "keep": "160 pairs"}
    kept, count = without_few_ties(pairs, JudgeConfig())
    assert (count, kept[0].label) == (3, (2 / 3, 1 / 3))
    many = [pair._replace(label=2) for pair in pairs]
    assert without_few_ties(many, JudgeConfig()) == (many, 0)
    with pytest.raises(ValueError, match=r"train_judge: .*got 160 ties"):
        without_few_ties(many, JudgeConfig(ties="drop"))


def test_it_writes_a_judge_and_says_what_it_is_worth(encoder, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra plot)")
    out = tmp_path / "judge"
    report = train_judge(written(), encoder, out=out, **SHORT)
    assert len(report.unseen) == 1
    assert report.away.metrics.pairs > 0
    text = (out / "report.txt").read_text()
    assert text.startswith(f"160 pairs\n{report.calibration.summary()[0]}")
    assert "the judge's gain" in text
    assert f"away: pairs with answers of {report.unseen[0]}" in text
    assert f"only {report.home.metrics.pairs} pairs, so its accuracy is ± " in text
    assert (out / "calibration.png").stat().st_size > 5_000
    found = json.loads((out / "report.json").read_text())
    assert found["home"]["flip_rate"] == 0
    assert found["away"]["rivals"]["a curve of length"]["log_loss"] > 0
    judge = PairwiseModel.from_pretrained(out / "model").eval()
    assert float(judge.head.temperature) == pytest.approx(report.calibration.temperature)
    assert "accuracy" in (out / "model" / "README.md").read_text()
    assert list((out / "features").rglob("*.safetensors"))
    with pytest.raises(ValueError, match=r"train_judge: the run in .* is finished"):
        train_judge(written(), encoder, out=out, **SHORT)
    with pytest.raises(ValueError, match=r"epochs is 3 there, got 2"):
        train_judge(written(), encoder, out=out, **SHORT | {"epochs": 2})


SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (BertConfig(**SIZES), {}, 4),
        (BertConfig(**SIZES | {"num_hidden_layers": 1}), {}, 1),
        (BertConfig(**SIZES), {"depth": 5}, 5),
        (BertConfig(**SIZES), {"freeze": "bottom:3"}, 6),
        # one layer that runs again and again
        (AlbertConfig(**SIZES | {"embedding_size": 8}), {}, 6),
        # its last layer differs from the others
        (GPTNeoXJapaneseConfig(**SIZES | {"max_position_embeddings": 64}), {}, 6),
    ],
)
def test_a_frozen_encoder_is_read_at_two_thirds_of_its_layers(tmp_path, config, settings, expected):
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    model = _model(tmp_path, written(4), JudgeConfig(max_tokens=32, **settings), "cpu")
    assert model.config.encoder.num_hidden_layers == expected


def test_what_is_no_encoder_of_text_is_refused_by_name(tmp_path):
    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_encoder"):
        _model(tmp_path, written(4), JudgeConfig(), "cpu")


class Stop(TrainerCallback):
    """Ctrl-C at the end of the second epoch."""

    def on_epoch_end(self, args, state, control, **rest):
        if state.epoch >= 2:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_to_the_same_judge(encoder, tmp_path, monkeypatch):
    pairs = pairs_of(120)
    options = SHORT | {"freeze": "bottom:1"}
    rows = [dict(zip(("prompt", "a", "b", "label"), pair, strict=True)) for pair in pairs]
    whole = train_judge(rows, encoder, out=tmp_path / "whole", **options)
    assert whole.away is None
    assert "away (unseen models): not measured" in str(whole)
    plain = PairwiseTrainer.__init__

    def stopping(self, *args, callbacks=(), **rest):
        plain(self, *args, callbacks=[*callbacks, Stop()], **rest)

    with monkeypatch.context() as patch:
        patch.setattr(PairwiseTrainer, "__init__", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_judge(rows, encoder, out=tmp_path / "again", **options)
    assert not (tmp_path / "again" / "model").exists()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    shutil.copytree(encoder, tmp_path / "kept")
    tokenizer.add_tokens(["Two"])
    tokenizer.save_pretrained(encoder)
    with pytest.raises(ValueError, match="tokenizer"):
        train_judge(rows, encoder, out=tmp_path / "again", **options)
    shutil.copytree(tmp_path / "kept", encoder, dirs_exist_ok=True)
    train_judge(rows, encoder, out=tmp_path / "again", **options)
    one, other = (
        PairwiseModel.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("whole", "again")
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_few_prompts_and_labels_of_two_shares_are_told_and_read(encoder, tmp_path):
    pairs = []
    for number, pair in enumerate(pairs_of(120)):
        label = (0.75, 0.25) if number % 2 else (0.25, 0.75)
        # 8 models for 4 prompts, so that pairs with an unseen model have prompts of training
        pairs.append(Pair(f"w{number % 4 + 9}", *pair[1:3], label, (f"m{number % 8}", "all")))
    report = train_judge(pairs, encoder, out=tmp_path / "out", **SHORT)
    for name in ("home", "away"):
        assert f"{name}: there are so few prompts" in str(report)
    assert "away (models) " in str(report)
    assert "away (prompts and models)" not in str(report)
    assert PairwiseModel.from_pretrained(tmp_path / "out" / "model").config.num_classes == 2


def test_no_part_shares_a_prompt_or_an_unseen_writer():
    pairs = [Pair(f"p{n % 200}", "a", "b", 0, (f"m{n % 12}", "everywhere")) for n in range(1200)]
    parts, unseen = divide(pairs, JudgeConfig())
    assert len(unseen) == 2
    assert "everywhere" not in unseen
    near = parts[:4]
    prompts = [{pair.prompt for pair in part} for part in near]
    assert sum(map(len, prompts)) == len(set().union(*prompts))
    assert not any(set(unseen) & set(pair.writers) for part in near for pair in part)
    assert all(set(unseen) & set(pair.writers) for pair in parts.away)
    assert not {pair.prompt for pair in parts.away} & {pair.prompt for pair in parts.seen()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unseen_writers": 9}, "unseen_writers is 9, expected fewer than the 8"),
        ({"unseen_writers": 7}, "unseen_writers=7 leaves"),
        ({"pairs": [pair._replace(label=2) for pair in written()]}, "every label is a tie"),
        ({"pairs": [*written(30), Pair("p", "a", "b")]}, "got 1 without a label"),
        ({"link": "concat", "surface": ("style",)}, "surface .* no surface features"),
        ({"epoch": 2}, "unknown field epoch; did you mean epochs"),
        ({"freeze": "top"}, "got 'top'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(changes, words, encoder, tmp_path):
    options = {"pairs": written(), **SHORT, **changes}
    with pytest.raises(ValueError, match=words):
        train_judge(options.pop("pairs"), encoder, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command_does_as_the_function(encoder, tmp_path, capsys):
    rows = [
        {"question": pair[0], "first": pair[1], "second": pair[2], "better": pair[3]}
        for pair in pairs_of(120)
    ]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(rows))
    columns = ["prompt=question", "a=first", "b=second", "label=better"]
    flags = ["--epochs", "1", "--batch-size", "16", "--columns", *columns]
    words = ["judge", "train", str(file), str(tmp_path / "out"), "--encoder", str(encoder), *flags]
    assert main(words) == 0
    assert "home (prompts): " in capsys.readouterr().out
    assert main(words) == 1
    assert "is finished" in capsys.readouterr().err
