"""A tokenizer and pairs for tests, with what tiny encoders need."""

import torch
from tests.support.models import ENCODERS, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from heads.pairwise import PairwiseModel

DECODERS = ("llama", "mistral", "qwen3", "gpt2")
PADDED = ("mpnet", "deberta")  # whose attention or positions `check_packing` rejects
PACKED = tuple(kind for kind in ENCODERS if kind not in PADDED)
WORDS = ["<pad>", "<cls>", "<sep>", "<unk>", *(f"w{i}" for i in range(90))]


def encoder_of(kind):
    """A tiny encoder, or a causal language model without its head."""
    made = tiny(kind, **({"sliding_window": 5} if kind == "mistral" else {}))
    return getattr(made, made.base_model_prefix, made)


def tokenizer_of(length=32, pad=0):
    """Words are tokens; [CLS] prompt [SEP] answer [SEP], with types 0 and 1."""
    words = {w: i for i, w in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[("<cls>", 1), ("<sep>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=length,
        pad_token=WORDS[pad],
        unk_token="<unk>",
        cls_token="<cls>",
        sep_token="<sep>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def model_of(kind="bert", seed=0, trained=True, **options):
    """A tiny model with a head that has something to say; the plainest settings by default."""
    options = {"link": "davidson", "pooling": ["mean"], "surface": []} | options
    pad = tiny(kind).config.pad_token_id or 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PairwiseModel.from_encoder(encoder_of(kind), tokenizer_of(pad=pad), **options)
        for parameter in (*model.head.parameters(), *model.pool.parameters()) if trained else ():
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def words(*numbers):
    return " ".join(f"w{n}" for n in numbers)


def pairs_of(count, seed=0, longest=9, labels=3):
    """Pairs whose better answer is the one that says w7; where both or none do, they tie or, of
    two, A is better."""
    draw = torch.Generator().manual_seed(seed)

    def some():
        length = int(torch.randint(1, longest, (1,), generator=draw))
        return torch.randint(8, 90, (length,), generator=draw).tolist()

    found = []
    for _ in range(count):
        prompt, a, b = some(), some(), some()
        says = [bool(torch.rand((), generator=draw) < 0.5) for _ in range(2)]
        for answer, good in zip((a, b), says, strict=True):
            answer[len(answer) // 2] = 7 if good else answer[len(answer) // 2]
        label = (2 if labels == 3 else 0) if says[0] == says[1] else says.index(True)
        found.append((words(*prompt), words(*a), words(*b), label))
    return found
