"""The model: fair bit by bit from text to verdict, saved and loaded, packed and padded alike,
ranking and LoRA."""

import json
import warnings

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tests.heads.pairwise.support import (
    DECODERS,
    PACKED,
    PADDED,
    encoder_of,
    model_of,
    pairs_of,
    tokenizer_of,
    words,
)
from tests.support.models import tiny
from transformers import (
    AutoModel,
    GPTNeoConfig,
    GPTNeoModel,
    RoFormerConfig,
    RoFormerModel,
    SqueezeBertConfig,
    SqueezeBertModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    TrainingArguments,
    XLMConfig,
    XLMModel,
    XLNetConfig,
    XLNetModel,
)

from heads.lora import accelerate_lora_
from heads.pairwise import (
    PairwiseCollator,
    PairwiseConfig,
    PairwiseModel,
    PairwiseTrainer,
    calibrate_,
    freeze_,
    pairwise_report,
    predict_pairs,
)
from heads.pairwise.inference import _bradley_terry
from heads.pairwise.packing import encode_padded
from heads.pairwise.surface import NAMES, columns_of
from heads.pairwise.surgery import encoder_parts
from heads.pairwise.training.parameters import parameter_groups

FAIR = ("davidson", "antisymmetric")
PAIRS = [pair[:3] for pair in pairs_of(40, seed=5)]
LISTS = [list(column) for column in zip(*PAIRS, strict=True)]


def predicted(model, turned=False, **options):
    prompts, a, b = LISTS
    return model.predict(prompts, b if turned else a, a if turned else b, progress=False, **options)


@pytest.mark.parametrize("kind", [*PACKED, *DECODERS, *PADDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_answers_swaps_verdicts_and_moves_no_bit(kind, dtype):
    if (kind, dtype) == ("deberta", torch.bfloat16):
        pytest.skip("transformers' DeBERTa mixes dtypes in half precision")
    for link in FAIR:
        model = model_of(kind, link=link, dtype=dtype)
        assert model.head.outer.weight.dtype == torch.float32
        one, other = predicted(model), predicted(model, turned=True)
        assert torch.equal(one.log_probabilities[:, [1, 0, 2]], other.log_probabilities)
        assert torch.equal(one.swapped_log_probabilities, one.log_probabilities)
        assert one.probabilities[:, :2].std() > 1e-3
        if link != "antisymmetric":
            assert torch.equal(one.scores.flip(1), other.scores)


def test_a_batch_in_which_some_pairs_are_exchanged():
    model = model_of()
    data = model.dataset(PAIRS, progress=False)
    turned = model.dataset(
        [(p, b, a) if i % 3 else (p, a, b) for i, (p, a, b) in enumerate(PAIRS)], progress=False
    )
    one, other = (
        model(**PairwiseCollator()([d[i] for i in range(len(d))])).logits for d in (data, turned)
    )
    for i in range(len(PAIRS)):
        assert torch.equal(other[i], one[i, [1, 0, 2]] if i % 3 else one[i])


def test_an_answer_against_itself_ties():
    model = model_of(link="antisymmetric")
    found = model.predict(["w1"], ["w2 w3"], ["w2 w3"], progress=False)
    assert found.log_probabilities[0, 0] == found.log_probabilities[0, 1]
    assert found.verdicts == ["tie"]


def test_the_early_head_flips():
    found = predicted(model_of(link="concat"))
    assert not torch.allclose(found.log_probabilities, found.swapped_log_probabilities)


@pytest.mark.parametrize("kind", [*PACKED, *DECODERS, *PADDED])
def test_batches_do_not_matter(kind):
    model = model_of(kind)
    assert model.packs == (kind not in PADDED)
    for one in (predicted(model, batch_size=n).log_probabilities for n in (1, 7)):
        torch.testing.assert_close(one, predicted(model).log_probabilities)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "llama", "mpnet"])
def test_saved_and_loaded(kind, tmp_path):
    model = model_of(kind, link="davidson", pooling=["mean", "last"], hidden_features=4)
    model.head.temperature.fill_(1.7)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["encoder"]["model_type"]
    again = PairwiseModel.from_pretrained(tmp_path)
    assert again.tokenizer is not None
    assert float(again.head.temperature) == pytest.approx(1.7)
    assert again.config.max_tokens == model.config.max_tokens
    torch.testing.assert_close(
        predicted(model).log_probabilities, predicted(again).log_probabilities
    )
    assert type(again.config.encoder) is type(model.config.encoder)
    model.tokenizer = None
    model.save_pretrained(tmp_path / "bare")
    bare = PairwiseModel.from_pretrained(tmp_path / "bare")
    assert bare.tokenizer is None
    with pytest.raises(ValueError, match=r"PairwiseModel:.*tokenizer"):
        bare.predict(["p"], ["x"], ["y"])


def test_weights_load_in_float32_unless_asked(tmp_path):
    tiny("bert").half().save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).dtype == torch.float16  # what transformers 5 does
    assert PairwiseModel.from_encoder(tmp_path).encoder.dtype == torch.float32
    assert PairwiseModel.from_encoder(tmp_path, dtype=None).encoder.dtype == torch.float16
    half = PairwiseModel.from_encoder(tmp_path, dtype=torch.bfloat16)
    assert half.encoder.dtype == torch.bfloat16
    assert half.head.outer.weight.dtype == torch.float32
    half.save_pretrained(tmp_path / "half")
    assert {p.dtype for p in PairwiseModel.from_pretrained(tmp_path / "half").parameters()} == {
        torch.float32
    }
    assert (
        PairwiseModel.from_pretrained(tmp_path / "half", dtype=torch.bfloat16).encoder.dtype
        == torch.bfloat16
    )


def test_an_encoder_that_always_calls_its_pooler_carries_a_judge(tmp_path):
    groups = ("q", "k", "v", "post_attention", "intermediate", "output")
    encoder = SqueezeBertModel(
        SqueezeBertConfig(
            vocab_size=96,
            hidden_size=16,
            embedding_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            **{f"{name}_groups": 1 for name in groups},
        )
    )
    model = PairwiseModel.from_encoder(encoder, tokenizer_of()).eval()
    model.save_pretrained(tmp_path / "judge")
    again = PairwiseModel.from_pretrained(tmp_path / "judge")
    first, second = (m.predict(["w8"], ["w9"], ["w7"], progress=False) for m in (model, again))
    assert torch.equal(first.log_probabilities, second.log_probabilities)


def test_a_head_on_a_model_with_another_head_takes_the_encoder_inside():
    outer = tiny("classifier")
    model = PairwiseModel.from_encoder(outer, tokenizer_of())
    assert model.encoder is outer.bert
    assert not list(model.encoder.pooler.parameters())
    assert not any("pooler" in name for name, _ in model.named_parameters())


def test_wrong_encoders_and_tokenizers_are_refused():
    other = tokenizer_of(pad=3)
    with pytest.raises(ValueError, match=r"from_encoder:.*pad_token_id.*3.*0"):
        PairwiseModel.from_encoder(tiny("bert"), other)
    with pytest.raises(ValueError, match=r"from_encoder:.*tokenizer.*94.*50"):
        PairwiseModel.from_encoder(tiny("bert", vocab_size=50), tokenizer_of())
    with pytest.raises(ValueError, match=r"from_encoder:.*tokenizer.*94.*93"):
        PairwiseModel.from_encoder(tiny("bert", vocab_size=93), tokenizer_of())
    assert (
        PairwiseModel.from_encoder(
            tiny("bert", vocab_size=94), tokenizer_of()
        ).config.encoder.vocab_size
        == 94
    )
    with pytest.raises(ValueError, match=r"from_encoder:.*encoder"):
        PairwiseModel.from_encoder(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"from_encoder:.*max_tokens.*99.*BertModel.*32"):
        PairwiseModel.from_encoder(tiny("bert"), tokenizer_of(), max_tokens=99)
    with pytest.raises(ValueError, match=r"from_encoder:.*pooling"):
        PairwiseModel.from_encoder(tiny("bert"), pool="max")
    with pytest.raises(ValueError, match=r"PairwiseModel:.*encoder"):
        PairwiseModel(PairwiseConfig())
    with pytest.raises(ValueError, match=r"PairwiseModel:.*last_hidden_state"):
        encode_padded(tiny("classifier"), torch.tensor([5]), [1], None)
    config = T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match=r"from_encoder:.*T5Model"):
        PairwiseModel.from_encoder(T5Model(config), tokenizer_of())


def test_long_positions_leave_room_for_the_padding_id():
    assert model_of("roberta", max_tokens=61).config.max_tokens == 61
    with pytest.raises(ValueError, match=r"from_encoder:.*62.*positions"):
        model_of("roberta", max_tokens=63)


@pytest.mark.parametrize("given", [(["p"], ["x", "y"], ["z"]), ("p", "x", "y")])
def test_predict_refuses(given):
    with pytest.raises(ValueError, match=r"expected lists of (equal length|texts)"):
        model_of().predict(*given)


def test_predict_leaves_the_mode_alone_and_refuses_numbers_that_are_none():
    model = model_of().train()
    predicted(model)
    assert model.training
    with torch.no_grad():
        model.head.outer.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"predict_pairs:.*logits"):
        predicted(model)
    with pytest.raises(ValueError, match=r"predict_pairs:.*got 0 pairs"):
        predict_pairs(model, model.dataset([], progress=False))


@pytest.mark.parametrize("link", [*FAIR, "concat"])
def test_rank_orders_answers(link):
    model = model_of(link=link)
    answers = [words(k, k + 1, k * 2 % 90) for k in range(6)]
    found = model.rank("w1 w2", answers)
    assert sorted(found.order) == list(range(6))
    assert abs(float(found.scores.sum())) < 1e-9
    assert [float(found.scores[i]) for i in found.order] == sorted(
        found.scores.tolist(), reverse=True
    )
    torch.testing.assert_close(found.wins + found.wins.T, torch.ones(6, 6, dtype=torch.float64))
    if link == "davidson":  # the tournament's order is that of the scores
        both = model.predict(["w1 w2"] * 6, answers, answers, progress=False).scores[:, 0]
        assert found.order == tuple(both.argsort(descending=True).tolist())
    alone = model.rank("p", ["one"])
    assert (alone.order, alone.scores.tolist(), alone.wins.tolist()) == ((0,), [0.0], [[0.5]])
    with pytest.raises(ValueError, match=r"rank:.*text"):
        model.rank("p", [])
    with pytest.raises(ValueError, match=r"rank: answer.*1.*3"):
        model.rank("p", ["one", 3])
    more = model.rank("w1 w2", [*answers, words(*range(80))])
    # a further answer changes nothing
    torch.testing.assert_close(more.wins[:6, :6], found.wins, rtol=1e-5, atol=1e-6)
    backwards = model.rank("w1 w2", answers[::-1])
    torch.testing.assert_close(backwards.scores.flip(0), found.scores, rtol=1e-4, atol=1e-5)


def test_scores_of_a_ranking_are_the_likeliest():
    true = torch.tensor([0.0, 1.0, -0.5, 2.0], dtype=torch.float64)
    wins = torch.sigmoid(true[:, None] - true[None])
    torch.testing.assert_close(_bradley_terry(wins), true - true.mean())
    shares = torch.tensor([[0.5, 0.8, 0.3], [0.2, 0.5, 0.6], [0.7, 0.4, 0.5]]).double()
    scores = _bradley_terry(shares).requires_grad_()
    apart = scores[:, None] - scores[None]
    (shares * torch.nn.functional.logsigmoid(apart)).sum().backward()
    assert scores.grad.abs().max() < 1e-9
    far = torch.tensor([0.0, 20.0, 40.0, 60.0], dtype=torch.float64)
    near = torch.sigmoid(far[:, None] - far[None])
    torch.testing.assert_close(_bradley_terry(near), far - far.mean(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "kind", ["bert", "distilbert", "electra", "modernbert", "llama", "mpnet", "deberta"]
)
def test_freezing(kind):
    model = model_of(kind)
    layers = model.encoder.config.num_hidden_layers
    head = {n for n, _ in model.named_parameters() if n.startswith(("head", "pool"))}
    trained = {}
    for what in ("none", "embeddings", "bottom:1", f"bottom:{layers}", "all"):
        report = freeze_(model, what)
        trained[what] = {n for n, p in model.named_parameters() if p.requires_grad}
        assert report.trained_parameters == sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
        assert head <= trained[what]
    assert trained["all"] == head
    assert trained["none"] == {n for n, _ in model.named_parameters()}
    assert (
        trained["none"]
        > trained["embeddings"]
        > trained["bottom:1"]
        > trained[f"bottom:{layers}"]
        >= head
    )
    assert "embeddings" in str(freeze_(model, "bottom:1"))
    for what in ("bottom", "bottom:0", f"bottom:{layers + 1}", "top:2"):
        with pytest.raises(ValueError, match=r"freeze_: expected .*got"):
            freeze_(model, what)


def test_shared_layers_cannot_be_frozen_one_by_one():
    model = model_of("albert")
    with pytest.raises(ValueError, match="do its layers share parameters"):
        freeze_(model, "bottom:1")
    with pytest.raises(ValueError, match="do its layers share parameters"):
        parameter_groups(model, learning_rate=1.0, layer_decay=0.5)
    assert freeze_(model, "all").frozen == ("encoder",)


def test_rates_fall_from_layer_to_layer():
    model = model_of("bert")
    groups = parameter_groups(
        model, learning_rate=1.0, weight_decay=0.1, layer_decay=0.5, head_lr_ratio=10.0
    )
    place = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    found = {name: place[id(p)] for name, p in model.named_parameters()}
    assert len(place) == len(found)
    assert found["encoder.encoder.layer.1.attention.self.query.weight"] == (1.0, 0.1)
    assert found["encoder.encoder.layer.0.attention.self.query.weight"] == (0.5, 0.1)
    assert found["encoder.encoder.layer.0.attention.self.query.bias"] == (0.5, 0.0)
    assert found["encoder.encoder.layer.0.output.LayerNorm.weight"] == (0.5, 0.0)
    assert found["encoder.embeddings.word_embeddings.weight"] == (0.25, 0.1)
    assert found["head.outer.weight"] == (10.0, 0.1)
    assert found["head.tie"] == (10.0, 0.0)
    freeze_(model, "all")
    assert sum(len(g["params"]) for g in parameter_groups(model, learning_rate=1.0)) == 2
    with pytest.raises(ValueError, match=r"parameter_groups:.*layer_decay.*0"):
        parameter_groups(model, learning_rate=1.0, layer_decay=0)


def test_what_lies_above_the_layers_has_the_top_layers_rate():
    model = model_of("llama")
    groups = parameter_groups(model, learning_rate=1.0, layer_decay=0.5)
    assert [
        g["lr"] for g in groups if any(p is model.encoder.norm.weight for p in g["params"])
    ] == [1.0]


@pytest.mark.parametrize("kind", ["bert", "modernbert", "llama"])
def test_lora_on_the_encoder(kind, tmp_path):
    model = model_of(kind)
    targets = {"bert": ["query", "value"], "modernbert": ["Wqkv"], "llama": ["q_proj", "v_proj"]}[
        kind
    ]
    config = LoraConfig(target_modules=targets, modules_to_save=["head"], r=2)
    tuned = get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert tuned.packs
    batch = PairwiseCollator()([model.dataset(PAIRS, progress=False)[i] for i in range(8)])
    plain = tuned.eval()(**batch).logits
    assert accelerate_lora_(tuned).accelerated
    torch.testing.assert_close(tuned(**batch).logits, plain)
    if kind == "bert":
        with pytest.warns(UserWarning, match="the encoder has adapters, which from_pretrained can"):
            tuned.base_model.model.save_pretrained(tmp_path / "unmerged")
    tuned.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = PeftModel.from_pretrained(model_of(kind), tmp_path).eval()
    torch.testing.assert_close(again(**batch).logits, plain)


def test_adapters_keep_their_calibration_and_are_not_thawed(tmp_path):
    config = LoraConfig(target_modules=["query"], modules_to_save=["head", "pool"], r=2)
    tuned = get_peft_model(model_of(), config)
    data = tuned.dataset(pairs_of(60), progress=False)
    with torch.no_grad():
        tuned.head.outer.weight.mul_(5)
    temperature = calibrate_(tuned, data, progress=False).temperature
    assert temperature > 1.1
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(model_of(), tmp_path)
    assert float(again.head.temperature) == pytest.approx(temperature)
    torch.testing.assert_close(
        predicted(again).log_probabilities, predicted(tuned).log_probabilities
    )
    with pytest.raises(ValueError, match=r"freeze_:.*adapters"):
        freeze_(tuned, "none")


def test_a_tokenizer_may_be_a_folder(tmp_path):
    tokenizer_of().save_pretrained(tmp_path)
    assert PairwiseModel.from_encoder(tiny("bert"), tmp_path).tokenizer.sep_token_id == 2


def test_without_max_tokens_there_is_a_clear_error():
    model = PairwiseModel(PairwiseConfig(encoder=tiny("bert").config))
    model.tokenizer = tokenizer_of()
    with pytest.raises(ValueError, match=r"PairwiseDataset:.*config\.max_tokens"):
        model.predict(["p"], ["x"], ["y"])


def test_the_trunk_of_autocast_is_half_and_the_head_is_not():
    model = model_of()
    batch = PairwiseCollator()([model.dataset(PAIRS, progress=False)[i] for i in range(4)])
    with torch.autocast("cpu", torch.bfloat16):
        made = model(**batch).logits
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, model(**batch).logits, rtol=0.1, atol=0.1)


def test_a_sequence_may_be_a_single_token():
    model = model_of()
    alone = model.features(torch.tensor([3]), torch.tensor([1]))
    beside = model.features(torch.tensor([3, 4, 5]), torch.tensor([1, 2]))
    torch.testing.assert_close(beside[:1], alone)


def test_lengths_that_do_not_add_up_are_refused():
    model = model_of()
    with pytest.raises(ValueError, match=r"PairwiseModel:.*\[2.*2\].*5"):
        model(torch.tensor([4, 5, 6, 7, 8]), torch.tensor([2, 2]), torch.tensor([[0, 1]]))


def test_auto_classes_know_the_model(tmp_path):
    from transformers import AutoConfig

    model_of().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), PairwiseConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), PairwiseModel)


@pytest.mark.parametrize("kind", ["bert", "llama", "modernbert"])
def test_the_lowest_layers_are_those_of_the_whole(kind, tmp_path):
    whole = encoder_of(kind)
    count = whole.config.num_hidden_layers
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "output_hidden_states": True}
    wanted = whole(**given).hidden_states[1]
    model = PairwiseModel.from_encoder(encoder_of(kind), tokenizer_of(), depth=1).eval()
    assert model.config.encoder.num_hidden_layers == 1
    found = model.encoder(**given).last_hidden_state
    norm = next(
        (m for n, m in whole.named_children() if n in ("norm", "final_norm")), torch.nn.Identity()
    )
    torch.testing.assert_close(found[0], norm(wanted)[0])
    model.save_pretrained(tmp_path)
    again = PairwiseModel.from_pretrained(tmp_path)
    torch.testing.assert_close(
        predicted(model).log_probabilities, predicted(again).log_probabilities
    )
    for depth in (0, count + 1):
        with pytest.raises(ValueError, match=rf"depth is {depth}, expected 1 to {count}, "):
            PairwiseModel.from_encoder(encoder_of(kind), tokenizer_of(), depth=depth)


def test_the_settings_that_judged_best_are_the_defaults():
    config = PairwiseModel.from_encoder(tiny("bert"), tokenizer_of()).config
    assert (config.link, config.pooling) == ("antisymmetric", ["mean", "last"])
    assert config.surface == ["length", "style", "overlap"]
    assert (
        PairwiseModel.from_encoder(tiny("bert"), tokenizer_of(), link="concat").config.surface == []
    )


def test_a_tokenizer_of_special_tokens_alone_is_refused(tmp_path):
    tiny("bert").save_pretrained(tmp_path)  # transformers makes a tokenizer of nothing
    with pytest.raises(
        ValueError, match=r"expected a tokenizer with tokens for text, got .* all of them special"
    ):
        PairwiseModel.from_encoder(tmp_path)


def test_an_encoder_that_would_not_load_again_is_refused(tmp_path):
    sizes = {"vocab_size": 99, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_kv": 4, "d_ff": 8}
    with pytest.raises(ValueError, match=r"AutoModel\.from_config can rebuild, got T5EncoderModel"):
        PairwiseModel.from_encoder(T5EncoderModel(T5Config(**sizes)))
    kinds = [[["global", "local"], 2]]
    config = GPTNeoConfig(
        vocab_size=99, hidden_size=8, num_layers=4, num_heads=1, attention_types=kinds
    )
    model = PairwiseModel.from_encoder(GPTNeoModel(config), depth=3)
    model.save_pretrained(tmp_path)
    assert PairwiseModel.from_pretrained(tmp_path).config.encoder.num_layers == 3


def test_tables_beside_that_of_the_tokens_are_of_the_bottom():
    for kind, names in (("gpt2", ["embeddings", "wpe"]), ("llama", ["embeddings"])):
        assert [name for name, _ in encoder_parts(encoder_of(kind), "embeddings")] == names


def test_parts_of_layers_side_by_side_are_no_list_of_layers():
    config = XLMConfig(vocab_size=99, emb_dim=16, n_layers=3, n_heads=2)
    model = PairwiseModel.from_encoder(XLMModel(config))
    with pytest.raises(ValueError, match="freeze_: XLMModel has no list of 3 layers"):
        freeze_(model, "bottom:2")
    with pytest.raises(ValueError, match="from_encoder: XLMModel has no list of 3 layers"):
        PairwiseModel.from_encoder(XLMModel(config), depth=2)


def test_a_table_of_sines_never_trains():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RoFormerConfig(vocab_size=99, intermediate_size=16, **sizes)
    model = PairwiseModel.from_encoder(RoFormerModel(config))
    for what in ("bottom:1", "none"):
        freeze_(model, what)
        assert not model.encoder.encoder.embed_positions.weight.requires_grad
    assert all(p.requires_grad for p in model.encoder.embeddings.parameters())


def test_an_encoder_without_a_limit_of_positions_is_saved(tmp_path):
    config = XLNetConfig(vocab_size=99, d_model=16, n_layer=2, n_head=2, d_inner=16)
    PairwiseModel.from_encoder(XLNetModel(config)).save_pretrained(tmp_path)
    assert PairwiseModel.from_pretrained(tmp_path).config.max_tokens == 512


def test_an_attention_that_is_chosen_stays():
    model = model_of()
    wanted = predicted(model).log_probabilities
    assert model.packs
    model.encoder.set_attn_implementation("eager")
    assert not model.packs
    torch.testing.assert_close(predicted(model).log_probabilities, wanted)
    assert model.encoder.config._attn_implementation == "eager"


def test_surface_features_are_saved_and_said(tmp_path):
    model = model_of(
        link="antisymmetric", surface=["length", "overlap"], pooling=["mean", "last"], trained=False
    )
    data = model.dataset(pairs_of(200), progress=False)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=30,
        learning_rate=3e-3,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    PairwiseTrainer(model=model, args=arguments, train_dataset=data, head_lr_ratio=1.0).train()
    assert bool(model.head.encoding.edges.any())
    report = pairwise_report(model, data, progress=False)
    assert list(report.owed) == ["encoder", "length", "overlap"]
    assert "log-loss if both answers were equal in one input: encoder" in str(report)
    model.save_pretrained(tmp_path / "model")
    again = PairwiseModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(
        predicted(again).log_probabilities, predicted(model).log_probabilities
    )
    turned = predicted(model, turned=True)
    assert torch.equal(turned.log_probabilities[:, [1, 0, 2]], predicted(model).log_probabilities)


def test_alike_in_one_thing_is_what_it_says():
    model = model_of(link="antisymmetric", surface=["length", "style"])
    model.head.encoding.edges.copy_(torch.randn_like(model.head.encoding.edges).sort(1).values)
    a, b = torch.randn(2, 6, 16)
    one, other = torch.randn(2, 6, len(NAMES))
    columns = columns_of(["length"])
    same_a, same_b = one.clone(), other.clone()
    same_a[:, columns] = same_b[:, columns] = (one[:, columns] + other[:, columns]) / 2
    torch.testing.assert_close(
        model.compare(a, b, one, other, alike="length").logits,
        model.compare(a, b, same_a, same_b).logits,
    )
    mean = (a + b) / 2
    torch.testing.assert_close(
        model.compare(a, b, one, other, alike="encoder").logits,
        model.compare(mean, mean, one, other).logits,
    )


@pytest.mark.parametrize("link", [*FAIR, "concat"])
def test_ranking_in_batches_changes_nothing(link):
    model, answers = model_of(link=link), [words(k, k + 1, k * 2 % 90) for k in range(11)]
    whole, parts = model.rank("w1 w2", answers), model.rank("w1 w2", answers, batch_size=4)
    assert whole.order == parts.order
    torch.testing.assert_close(whole.wins, parts.wins, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.scores, parts.scores, rtol=1e-3, atol=1e-4)


def test_forward_says_what_it_needs():
    model = model_of()
    with pytest.raises(ValueError, match=r"PairwiseModel:.*features"):
        model(pairs=torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"PairwiseModel:.*sequences"):
        model(features=torch.zeros(2, 16))


@pytest.mark.parametrize("link", [*FAIR, "concat"])
def test_ranking_is_of_a_model_in_evaluation_with_its_temperature(link):
    model, answers = model_of(link=link, dropout=0.5), [words(k, k + 1) for k in range(5)]
    model.head.temperature.fill_(3.0)
    wins = model.rank("w1 w2", answers).wins
    model.train()
    torch.testing.assert_close(model.rank("w1 w2", answers).wins, wins)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.rank("w1 w2", answers).wins, wins)
    model.eval()
    found = model.predict(["w1 w2"] * 2, answers[:2], answers[2:4], progress=False)
    both = (found.probabilities + found.swapped_log_probabilities.exp()) / 2
    wanted = both[:, 0] + both[:, 2] / 2
    torch.testing.assert_close(
        torch.stack([wins[0, 2], wins[1, 3]]).float(), wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("link", FAIR)
def test_a_head_in_half_precision_ranks_and_judges(link):
    model = model_of(link=link, surface=["length"]).bfloat16()
    assert len(model.rank("w1", ["w2", "w3"]).order) == 2
    assert len(model.predict(["w1"], ["w2"], ["w3"], progress=False).verdicts) == 1


def test_batches_of_nothing_are_refused():
    model = model_of()
    with pytest.raises(ValueError, match=r"predict_pairs:.*1.*got 1 pairs.*batch_size of 0"):
        model.predict(["p"], ["a"], ["b"], batch_size=0, progress=False)
    with pytest.raises(ValueError, match=r"rank: batch_size.*0.*1"):
        model.rank("p", ["a", "b"], batch_size=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 4096}, r"from_pretrained: max_tokens.*4096.*BertModel"),
        ({"dropout": None}, r"PairwiseConfig:.*dropout"),
        ({"dropout": "0.1"}, r"PairwiseConfig:.*'0.1'"),
        ({"pooling": [["mean"]]}, r"PairwiseConfig:.*\[\['mean'\]\]"),
        ({"pooling": None}, r"PairwiseConfig: pooling is None"),
        ({"ties": None}, r"PairwiseConfig:.*False"),
    ],
)
def test_a_config_that_was_edited_is_refused(changes, said, tmp_path):
    model_of().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=said):
        PairwiseModel.from_pretrained(tmp_path)


def test_an_encoder_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"from_encoder: models/encodr cannot be read.*We"):
        PairwiseModel.from_encoder("models/encodr")


def test_one_of_several_ids_that_end_a_text_is_right():
    tokenizer = tokenizer_of()
    tokenizer.eos_token = "<sep>"
    PairwiseModel.from_encoder(tiny("llama", eos_token_id=[2, 5]).model, tokenizer)
    with pytest.raises(ValueError, match="eos_token_id is 2"):
        PairwiseModel.from_encoder(tiny("llama", eos_token_id=[4, 5]).model, tokenizer)


def test_answers_that_begin_elsewhere_are_different():
    model = model_of("bert")
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.eos_token = "<sep>"
    model.tokenizer = tokenizer
    prompts, answers = ["w1", "w1 w2"], ["w2 w3", "w3"]
    both = model.predict(prompts, answers, ["w9", "w9"], progress=False).log_probabilities
    for row, prompt, answer in zip(both, prompts, answers, strict=True):
        alone = model.predict([prompt], [answer], ["w9"], progress=False).log_probabilities[0]
        torch.testing.assert_close(row, alone)


def test_other_adapters_of_pefts_are_not_thawed():
    adapter = IA3Config(target_modules=["query", "value"], feedforward_modules=[])
    with pytest.raises(ValueError, match="the model has adapters"):
        freeze_(get_peft_model(model_of("bert"), adapter), "none")
