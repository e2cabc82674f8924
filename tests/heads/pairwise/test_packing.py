"""Packed encoders against the sequences alone: states and every gradient; and the check that finds
leaks."""

import pytest
import torch
from tests.heads.pairwise.support import DECODERS, PACKED, PADDED, encoder_of
from tests.support.equivalence import judge
from tests.support.models import tiny
from torch.func import functional_call
from transformers import AttentionInterface, Gemma2Config, Gemma2Model

from heads.pairwise import check_packing, packing
from heads.pairwise.packing import ATTENTION, encode_packed, encode_padded

LENGTHS = (7, 1, 12, 3)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setattr(packing, "_CHECKED", {})


def ids_of(lengths=LENGTHS):
    return torch.randint(4, 90, (sum(lengths),), generator=torch.Generator().manual_seed(1))


class Encode(torch.nn.Module):
    """An encoder whose call is one of ours."""

    def __init__(self, encoder, call):
        super().__init__()
        self.encoder, self.call = encoder, call

    def forward(self, ids, types):
        return self.call(self.encoder, ids, types)


def alone(encoder, ids, types):
    """Every sequence by itself, through the stock encoder."""
    encoder.config._attn_implementation = "eager"
    found = []
    for part, kinds in zip(ids.split(LENGTHS), types.split(LENGTHS), strict=True):
        options = {"token_type_ids": kinds[None]} if types.any() else {}
        found.append(encoder(input_ids=part[None], **options).last_hidden_state[0])
    return torch.cat(found)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("kind", [*PACKED, *DECODERS, *PADDED])
def test_packed_is_what_each_sequence_is_alone(kind, typed):
    encoder = encoder_of(kind)
    if typed and (getattr(encoder.config, "type_vocab_size", 0) or 0) < 2:
        pytest.skip("it has no token types")
    report = check_packing(encoder)
    assert report.packed == (kind not in PADDED)
    ids, types = ids_of(), torch.zeros(sum(LENGTHS), dtype=torch.long)
    types[5::2] = int(typed)

    def fast(encoder, ids, types):
        kinds = types if typed else None
        if not report.packed:
            return encode_padded(encoder, ids, LENGTHS, kinds)
        encoder.config._attn_implementation = ATTENTION
        return encode_packed(encoder, ids, LENGTHS, kinds, report.offset)

    def calling(call):
        module = Encode(encoder, call)
        return lambda **parameters: functional_call(module, parameters, (ids, types))

    encoder.pooler = None
    names = {f"encoder.{name}": p.detach() for name, p in encoder.named_parameters()}
    judge(
        f"encoder, {kind}",
        "packed" if report.packed else "padded",
        calling(fast),
        calling(alone),
        names,
        dtype=torch.float32,
        case="types" if typed else "",
        device="cpu",
    )


@pytest.mark.parametrize("kind", [*PACKED, *DECODERS])
def test_nothing_leaks_from_one_sequence_to_another(kind):
    encoder = encoder_of(kind)
    report = check_packing(encoder)
    ids = ids_of()
    other = ids.clone()
    other[:7] = ids[:7].flip(0)
    one, moved = (encode_packed(encoder, t, LENGTHS, None, report.offset) for t in (ids, other))
    assert not torch.equal(one[:7], moved[:7])
    assert torch.equal(one[7:], moved[7:])


def test_an_encoder_that_leaks_is_not_packed(monkeypatch):
    """The stock behavior: the ends of sequences are not looked at."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def deaf(*args, **options):
        return sdpa_attention_forward(
            *args, **{k: v for k, v in options.items() if "seq_lens" not in k}
        )

    ours = AttentionInterface._global_mapping[ATTENTION]
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, deaf)
    encoder = tiny("bert")
    report = check_packing(encoder)
    assert not report.packed
    assert "differ from the states of each sequence alone" in str(report)
    assert encoder.config._attn_implementation == "sdpa"
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, ours)
    assert not check_packing(tiny("bert")).packed  # once for each class
    packing._CHECKED.clear()
    assert check_packing(tiny("bert")).packed


def test_positions_of_ones_own_are_found():
    assert check_packing(tiny("roberta")).offset == 2  # counted from the padding id
    assert check_packing(tiny("bert")).offset == 0
    assert check_packing(tiny("roberta", pad_token_id=4)).offset == 5
    assert check_packing(tiny("roberta", pad_token_id=0)).offset == 1


def test_what_our_attention_does_not_have_is_padded():
    capped = tiny("gemma2").model
    assert "soft cap" in check_packing(capped).reason
    assert capped.config._attn_implementation != ATTENTION


def test_each_config_is_tried_for_itself():
    """A soft cap is no reason to pad another model of the class, nor the other way round."""

    def encoder(cap):
        return Gemma2Model(
            Gemma2Config(
                vocab_size=60,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=8,
                intermediate_size=8,
                attn_logit_softcapping=cap,
                max_position_embeddings=64,
            )
        )

    assert [check_packing(encoder(cap)).packed for cap in (None, 50.0, None)] == [True, False, True]


def test_half_precision_does_not_hide_where_positions_start():
    encoder = tiny("roberta")
    with torch.no_grad():
        encoder.embeddings.position_embeddings.weight.mul_(0.3)
    assert check_packing(encoder.bfloat16()).offset == 2


def test_training_mode_and_random_state_are_left_alone():
    encoder = tiny("bert").train()
    before = torch.random.get_rng_state()
    check_packing(encoder)
    assert encoder.training
    assert torch.equal(before, torch.random.get_rng_state())


# transformers 5.23 and on
@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        encoder = tiny("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
        check_packing(encoder)
        if checkpointing:
            encoder.gradient_checkpointing_enable({"use_reentrant": False})
        encode_packed(encoder, ids_of(), LENGTHS, None).square().sum().backward()
        found.append([p.grad for p in encoder.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
