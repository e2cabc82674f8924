"""Made-up pairs of answers and a small encoder, for `train_judge.py` and `search_judge.py`.

Prompts ask for a thing of some kind ("Name a tool."). An answer that names such a thing ("A hammer,
of course.") is better than one that does not ("Why should I know that?"). Two answers tie if both
name a thing, or neither does.
"""

import random
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from heads.pairwise import Pair

KINDS = {
    "fruit": "apple banana cherry grape lemon mango melon peach pear plum",
    "animal": "badger cat dog fox goat horse lion mouse sheep wolf",
    "tool": "axe chisel drill hammer knife pliers rake saw shovel spanner",
    "colour": "black blue brown green grey orange pink red white yellow",
}
GOOD = (
    "{}.",
    "I would say {}.",
    "{}, of course.",
    "That would be {}, as far as I know.",
    "Let me think. {}!",
)
BAD = (
    "No idea.",
    "Ask someone else.",
    "I would rather not say.",
    "Why should I know that?",
    "Let me think. No.",
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def made_up(count: int, seed: int) -> list[Pair]:
    """Return labeled pairs; a label says which answer names a thing, or that they tie."""
    rng, pairs = random.Random(seed), []
    for _ in range(count):
        kind = rng.choice(list(KINDS))
        right = [rng.random() < 0.5 for _ in range(2)]
        words = KINDS[kind].split()
        answers = [
            rng.choice(GOOD).format(rng.choice(words)) if good else rng.choice(BAD)
            for good in right
        ]
        pairs.append(
            Pair(f"Name a {kind}.", *answers, 2 if right[0] == right[1] else right.index(True))
        )
    return pairs


def own_encoder(out: Path) -> Path:
    """Write a small BERT with random weights, and its tokenizer; return the folder."""
    folder = out / "encoder"
    if (folder / "config.json").exists():
        return folder
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    texts = [text for pair in made_up(2000, seed=7) for text in pair[:3]]
    made.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
