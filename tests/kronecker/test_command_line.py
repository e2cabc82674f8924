"""The command line, comparing, and what importing needs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from kronecker import (
    KroneckerConfig,
    PruneConfig,
    compare,
    convert_,
    from_pretrained,
    num_parameters,
    perplexity,
    prune_,
)
from kronecker.data.batches import positions_of
from kronecker.data.text import strided, text_batches, text_of
from kronecker.discovery.finding import COMPRESSED
from model_components._cli import main
from tests.support.models import save, save_tokenizer, tiny

WORDS = ["<unk>", *(f"w{i}" for i in range(95))]


@pytest.fixture
def place(tmp_path):
    """A model with a tokenizer, and a text."""
    save(tiny("gpt2"), tmp_path / "model")
    save_tokenizer(tmp_path / "model", WORDS)
    ids = torch.randint(1, 96, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i] for i in ids))
    return tmp_path


COMMON = ["--context", "16", "--tokens", "320"]


def test_convert_compare_and_fold(place, capsys):
    model, text = str(place / "model"), ["--calibration", str(place / "text.txt"), *COMMON]
    small = str(place / "small")
    assert main(["convert", model, small, "--low-rank", "0.5", "--no-progress", *text]) == 0
    assert "parameters" in capsys.readouterr().out
    assert not list(place.glob(".*"))
    assert main(["fold", small, str(place / "dense")]) == 0
    capsys.readouterr()
    files = ["--text", str(place / "text.txt"), *COMMON]
    assert main(["compare", model, small, str(place / "dense"), *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "perplexity" in lines[0]
    figures = [line.split() for line in lines[1:]]
    assert figures[1][2:4] == figures[2][2:4]  # folded: the same loss and perplexity
    assert figures[0][1] == figures[2][1]  # and the original's parameters


def test_models_of_other_tokenizers_are_not_compared(place, capsys):
    """Losses are per token; a vocabulary that is too small would end in torch's IndexError."""
    save(tiny("gpt2", 1), place / "other")
    save_tokenizer(place / "other", WORDS[::-1])
    save(tiny("gpt2", 1, vocab_size=50), place / "small")
    files = ["--text", str(place / "text.txt"), *COMMON]
    assert main(["compare", str(place / "model"), str(place / "other"), *files]) == 1
    message = capsys.readouterr().err
    assert "expected models that share one tokenizer" in message
    assert "other splits the text differently" in message
    assert main(["compare", str(place / "model"), str(place / "small"), *files]) == 1
    assert "expected 0 to 49" in capsys.readouterr().err
    files += ["--tokenizer", str(place / "model")]  # for models that have none
    assert main(["compare", str(place / "model"), str(place / "other"), *files]) == 1
    assert main(["compare", str(place / "model"), *files]) == 0


def test_shapes_in_the_command(place, capsys):
    command = [
        "convert",
        str(place / "model"),
        str(place / "out"),
        "--b-shape",
        "2",
        "1",
        "--init",
        "prune",
    ]
    assert main([*command, "--no-progress"]) == 0
    capsys.readouterr()
    assert main([*command, "--no-progress"]) == 1
    assert "the folder is not empty" in capsys.readouterr().err
    command[2] = str(place / "other")
    assert main([*command[:-1], "sequential"]) == 1
    assert "--calibration FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prune", str(place / "model"), str(place / "other")])
    assert "calibration" in capsys.readouterr().err
    (place / "text.txt").write_text("")
    assert main(["compare", str(place / "model"), "--text", str(place / "text.txt")]) == 1
    assert "has no text, expected a file with text" in capsys.readouterr().err
    assert main(["compare", str(place / "model"), "--text", str(place / "absent.txt")]) == 1
    assert "absent.txt, which is not a file" in capsys.readouterr().err
    (place / "bad.json").write_text("{")
    assert main(["compare", str(place / "model"), "--text", str(place / "bad.json")]) == 1
    assert "bad.json cannot be read: invalid JSON" in capsys.readouterr().err


def test_text_becomes_rows():
    count = [
        b.shape
        for b in text_batches(
            "abcdefghij", lambda t: [ord(c) for c in t], tokens=6, context=4, skip=3
        )
    ]
    assert count == [(1, 4)]
    with pytest.raises(ValueError, match=r"text_batches:.*4.*tokens.*3"):
        text_batches("abcd", lambda t: [1] * len(t), tokens=5, skip=3)
    with pytest.raises(ValueError, match=r"text_batches:.*tokenizer"):
        text_batches("abcd", lambda t: [], tokens=5)


def test_chats_are_read_turn_by_turn(tmp_path):
    chats = [
        {
            "messages": [
                {"role": "user", "content": "Hello."},
                {"role": "assistant", "content": "Yes?"},
            ],
            "n": 3,
        }
    ]
    (tmp_path / "chats.json").write_text(json.dumps([*chats, "plain", {"tags": ["a", "b"]}]))
    assert text_of(tmp_path / "chats.json") == "Hello.\nYes?\n\nplain\n\na\nb"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", '{"data": [{"text": "hello world"}]}', "hello world"),
        ("a.json", '"hello"', "hello"),
        ("a.json", '[{"content": [{"type": "text", "text": "hi there"}]}]', "hi there"),
        ("a.jsonl", '{"t": "a\u2028b"}\n  \n{"t": "c"}\n', "a\u2028b\n\nc"),
        ("a.jsonl", '\ufeff{"t": "a"}', "a"),
    ],
)
def test_records_are_read_as_they_stand(name, content, text, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert text_of(tmp_path / name) == text


def test_numbers_are_no_text_and_sizes_are_positive(tmp_path):
    (tmp_path / "a.json").write_text("3")
    with pytest.raises(ValueError, match=r"text_of:.*has no text"):
        text_of(tmp_path / "a.json")
    for size in ({"tokens": -5}, {"tokens": 5, "context": 0}):
        with pytest.raises(ValueError, match=r"text_batches: (tokens|context) is (-5|0), expected"):
            text_batches("abc", lambda t: [1] * len(t), **size)


@pytest.mark.parametrize(
    ("kind", "positions"), [("gpt2", 32), ("roberta", 62), ("bert", 32), ("llama", 64)]
)
def test_rows_are_as_long_as_a_model_has_positions_for(kind, positions):
    model = tiny(kind)
    assert positions_of(model) == positions
    prune_(model, PruneConfig(), calibration=[torch.full((2, positions), 5)], progress=False)
    with pytest.raises(
        ValueError,
        match=f"rows have {positions + 1} tokens, expected at most the model's {positions}",
    ):
        prune_(
            tiny(kind),
            PruneConfig(),
            calibration=[torch.full((2, positions + 1), 5)],
            progress=False,
        )


def test_pruning_in_the_command_writes_a_stock_model(place, capsys):
    records = [{"instruction": "w1 w2 w3", "output": " ".join(WORDS[1:60])}] * 8
    (place / "texts.json").write_text(json.dumps(records))
    command = [
        "prune",
        str(place / "model"),
        str(place / "out"),
        "--calibration",
        str(place / "texts.json"),
        *COMMON,
    ]
    assert main([*command, "--keep", "0.25", "--no-progress"]) == 0
    assert "11,920 to 7,168 parameters" in capsys.readouterr().out
    assert num_parameters(GPT2LMHeadModel.from_pretrained(place / "out")) == 7168
    assert len(AutoTokenizer.from_pretrained(place / "out")) == len(WORDS)
    assert not list(place.glob(".*"))
    assert main([*command, "--no-progress"]) == 1
    assert "the folder is not empty" in capsys.readouterr().err
    assert main([*command[:2], str(place / "new"), *command[3:], "--keep", "2"]) == 1
    assert "keep is 2.0" in capsys.readouterr().err
    assert not (place / "new").exists()


def test_pruning_by_influence_in_the_command_writes_a_model_that_says_how_it_loads(place, capsys):
    command = ["prune", str(place / "model"), str(place / "out"), *COMMON, "--no-progress"]
    command += ["--calibration", str(place / "text.txt"), "--keep", "0.5"]
    assert main([*command, "--allocate", "influence"]) == 0
    assert "load it with kronecker.from_pretrained" in capsys.readouterr().err
    assert "kronecker.from_pretrained" in (place / "out" / "README.md").read_text()
    small = from_pretrained(place / "out")
    assert len({layer.mlp.c_proj.weight.shape for layer in small.transformer.h}) > 1
    assert num_parameters(small) < num_parameters(tiny("gpt2"))
    # filled up to the size of the largest
    assert main(["fold", str(place / "out"), str(place / "stock")]) == 0
    stock = GPT2LMHeadModel.from_pretrained(place / "stock").eval()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, stock(ids).logits)


def test_mlps_of_different_sizes_end_as_a_stock_model(place, capsys):
    model, text = (
        str(place / "model"),
        ["--calibration", str(place / "text.txt"), *COMMON, "--no-progress"],
    )
    flags = ["--allocate", "influence", "--epochs", "0"]
    assert main(["prune", model, str(place / "small"), *flags, *text]) == 0
    assert main(["fold", str(place / "small"), str(place / "stock")]) == 0
    small, stock = (
        from_pretrained(place / "small"),
        GPT2LMHeadModel.from_pretrained(place / "stock").eval(),
    )
    assert num_parameters(small) <= num_parameters(stock) <= num_parameters(tiny("gpt2"))
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, stock(ids).logits)
    assert main(["convert", model, str(place / "thin"), "--low-rank", "0.5", *text]) == 0
    assert "LowRankLinear" in str(from_pretrained(place / "thin"))
    assert (
        main(
            [
                "convert",
                model,
                str(place / "table"),
                "--low-rank",
                "0.5",
                "--layers",
                "*.wte",
                *text,
            ]
        )
        == 0
    )
    assert [
        n for n, m in from_pretrained(place / "table").named_modules() if isinstance(m, COMPRESSED)
    ] == [
        "transformer.wte",
        "lm_head",
    ]
    assert (
        main(
            [
                "convert",
                model,
                str(place / "new"),
                "--preset",
                "gpt2-82m",
                "--layers",
                "*.wte",
                *text,
            ]
        )
        == 1
    )
    assert "expected --preset without --layers" in capsys.readouterr().err
    assert (
        main(["convert", str(place / "absent"), str(place / "new"), "--low-rank", "0.5", *text])
        == 1
    )
    assert "absent: there is no such folder" in capsys.readouterr().err
    assert main(["prune", model, str(place / "new"), "--tokenizer", "no/such", *text]) == 1
    assert "no/such has no tokenizer, expected --tokenizer" in capsys.readouterr().err


def test_comparing_measures_what_it_says():
    model = tiny("gpt2")
    ids = torch.randint(3, 96, (4, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert perplexity(model, [ids]) == pytest.approx(float(loss.exp()), rel=1e-4)
    assert perplexity(model, list(ids.split(1))) == pytest.approx(float(loss.exp()), rel=1e-4)
    small = tiny("gpt2")
    convert_(small, KroneckerConfig(b_shape=(2, 1), init="prune"))
    comparison = compare({"dense": model, "small": small}, [ids], runs=1, new=4)
    rows = comparison.models
    assert [r.parameters for r in rows] == [num_parameters(model), num_parameters(small)]
    assert all(r.forward_tokens_per_second > 0 and r.generated_tokens_per_second > 0 for r in rows)
    assert str(comparison).count("\n") == 2
    with pytest.raises(ValueError, match=r"perplexity:.*predict"):
        perplexity(model, [ids[:, :1]])
    with pytest.raises(ValueError, match=r"perplexity: token ids have shape \[1, 4, 20\]"):
        perplexity(model, [ids[None]])


def test_padding_does_not_count_in_a_perplexity():
    model = tiny("gpt2")
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(ids, (0, 5))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 5))
    batch = {"input_ids": padded, "attention_mask": mask}
    assert perplexity(model, [batch]) == pytest.approx(perplexity(model, [ids]), rel=1e-5)
    assert perplexity(model, [padded]) != pytest.approx(perplexity(model, [ids]), rel=1e-2)


def test_comparing_encoders_says_how_near_their_embeddings_are():
    model, small = tiny("bert").eval(), tiny("bert").eval()
    prune_(
        small, PruneConfig(keep=0.25), calibration=[torch.randint(3, 96, (4, 8))], progress=False
    )
    ids = torch.randint(3, 96, (5, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2:, 5:] = 0
    found = compare(
        {"dense": model, "small": small}, [{"input_ids": ids, "attention_mask": mask}], runs=1
    )
    assert found.models[0].cosines[""] == pytest.approx(1)
    with torch.no_grad():
        means = []
        for one in (model, small):
            states = one(input_ids=ids, attention_mask=mask).last_hidden_state
            means.append([row[m.bool()].mean(0) for row, m in zip(states, mask, strict=True)])
    cosines = [torch.cosine_similarity(a, b, dim=0) for a, b in zip(*means, strict=True)]
    assert found.models[1].cosines[""] == pytest.approx(float(sum(cosines) / 5), abs=1e-5)
    assert "cosine" in str(found)
    assert "generate" not in str(found)
    assert found.plot() is not None
    with pytest.raises(ValueError, match=r"compare:.*language"):
        compare({"a": tiny("gpt2"), "b": model}, [ids])


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_token_that_a_model_lacks_is_named_in_any_text(kind):
    models = {"whole": tiny(kind), "small": tiny(kind, vocab_size=50)}
    texts = {"known": [torch.tensor([[5, 6, 7]])], "unknown": [torch.tensor([[5, 6, 70]])]}
    with pytest.raises(ValueError, match="token ids go from 5 to 70, expected 0 to 49"):
        compare(models, texts, runs=1, new=1)


def test_comparing_refuses_what_it_cannot_measure():
    ids = torch.randint(3, 96, (1, 8))
    with pytest.raises(ValueError, match=r"compare:.*0.*models.*1"):
        compare({}, [ids])
    with pytest.raises(ValueError, match="compare: models is a list, expected a dict of models"):
        compare([tiny("gpt2")], [ids])
    with pytest.raises(ValueError, match=r"compare:.*first text.*token ids"):
        compare({"a": tiny("gpt2")}, {"empty": []})
    with pytest.raises(ValueError, match=r"compare:.*last_hidden_state"):
        compare({"a": tiny("classifier")}, [ids], runs=1)
    with pytest.raises(ValueError, match=r"compare:.*embeddings"):
        compare({"a": tiny("bert"), "b": tiny("bert", hidden_size=8)}, [ids], runs=1)
    with pytest.raises(ValueError, match=r"compare:.*accepts only 8 tokens.*8"):
        compare({"short": tiny("gpt2", n_positions=8)}, [ids])


@pytest.mark.parametrize("options", [["--rank", "7"], ["--init", "random"]])
def test_what_a_preset_sets_is_not_given_beside_it(options, place, capsys):
    assert (
        main(
            ["convert", str(place / "model"), str(place / "out"), "--preset", "gpt2-80m", *options]
        )
        == 1
    )
    message = "expected --rank and --init only with --b-shape, got them with --preset"
    assert message in capsys.readouterr().err


def test_several_texts_are_compared_in_windows_that_overlap(place, capsys):
    (place / "other.txt").write_text(" ".join(WORDS[1:60]))
    files = ["--text", str(place / "text.txt"), str(place / "other.txt")]
    assert main(["compare", str(place / "model"), *files, *COMMON, "--stride", "4"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert all(name in head for name in ("loss text", "perplexity other"))
    model = GPT2LMHeadModel.from_pretrained(place / "model").eval()
    encode = AutoTokenizer.from_pretrained(place / "model").encode
    ids = torch.tensor(encode((place / "text.txt").read_text())[:320])
    logs = []
    for end in range(1, 320):  # each token by itself, with the context that its window gives it
        begin = 0 if end < 16 else 4 * ((end - 16) // 4 + 1)
        with torch.no_grad():
            logits = model(input_ids=ids[begin:end][None]).logits[0, -1]
        logs.append(float(torch.log_softmax(logits, -1)[ids[end]]))
    batches = text_batches((place / "text.txt").read_text(), encode, tokens=320, context=16)
    windows = strided(batches, context=16, stride=4)
    assert perplexity(model, windows) == pytest.approx(
        torch.tensor(logs).mean().neg().exp().item(), rel=1e-4
    )
    assert f"{perplexity(model, windows):.2f}" in row
    assert main(["compare", str(place / "model"), *files[:2], files[1]]) == 1
    assert "expected --text files with different names" in capsys.readouterr().err
    assert main(["compare", str(place / "model"), *files, "--context", "8", "--stride", "9"]) == 1
    assert "stride is 9, expected 1 to 7" in capsys.readouterr().err


def test_a_checkpoint_without_all_weights_is_refused(place, capsys):
    weights = load_file(place / "model" / "model.safetensors")
    command = [
        "prune",
        str(place / "model"),
        str(place / "out"),
        "--calibration",
        str(place / "text.txt"),
        *COMMON,
    ]
    lost = {n: t for n, t in weights.items() if n != "transformer.h.1.mlp.c_proj.weight"}
    save_file(lost, place / "model" / "model.safetensors", {"format": "pt"})
    assert main(command) == 1
    assert (
        "some are missing or have another shape (1), such as transformer.h.1.mlp.c_proj.weight"
        in capsys.readouterr().err
    )
    save_file(
        weights | {"more": torch.zeros(1)}, place / "model" / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((place / "model" / "config.json").read_text())
    for changes, said in (
        ({"n_layer": config["n_layer"] + 1}, "such as transformer.h."),
        ({"n_head": 0}, "cannot be loaded: "),
    ):
        (place / "model" / "config.json").write_text(json.dumps(config | changes))
        assert main(command) == 1
        assert said in capsys.readouterr().err
    (place / "model" / "config.json").write_text(json.dumps(config))
    assert main([*command, "--no-progress"]) == 0
    # said, and gone on: some checkpoints carry more
    assert "does not use 1 of the weights in" in capsys.readouterr().err
    (place / "model" / "model.safetensors").write_bytes(b"cut")
    assert main([*command[:2], str(place / "again"), *command[3:]]) == 1
    assert "cannot be loaded: " in capsys.readouterr().err


def test_every_tensor_keeps_its_own_type(place):
    model = tiny("nemotron-h").bfloat16()
    bias = model.model.layers[1].mixer.gate.e_score_correction_bias
    bias.data = torch.tensor([30.0054, 30.0071, 30.0093])
    model.save_pretrained(place / "mixture")
    save_tokenizer(place / "mixture", WORDS)
    command = [
        "prune",
        str(place / "mixture"),
        str(place / "out"),
        "--calibration",
        str(place / "text.txt"),
        *COMMON,
    ]
    assert main([*command, "--no-progress", "--keep", "0.5"]) == 0
    # some versions of transformers load a router in float32, whatever the file has
    again = AutoModelForCausalLM.from_pretrained(place / "mixture")
    again.save_pretrained(place / "again")
    kept, before = (load_file(place / folder / "model.safetensors") for folder in ("out", "again"))
    assert {n: t.dtype for n, t in kept.items()} == {n: t.dtype for n, t in before.items()}
    name = next(n for n in kept if "e_score" in n)
    assert torch.equal(kept[name], before[name])


def test_an_adapter_is_no_model(place, capsys):
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")
    given = [
        "prune",
        str(place / "adapter"),
        str(place / "out"),
        "--calibration",
        str(place / "text.txt"),
    ]
    assert main(given) == 1
    assert (
        "adapter; merge the adapter first with model-components lora merge"
        in capsys.readouterr().err
    )
