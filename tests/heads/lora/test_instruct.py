"""Instruction data, packing, training and judges."""

import csv
import json

import pytest
import torch
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from heads.lora import (
    ChatTemplate,
    InstructionCollator,
    InstructionDataset,
    InstructionTrainer,
    ModelLikelihood,
    ReferenceOverlap,
    Run,
    alpaca_template,
    answer_loss,
    append_run,
    check_packing,
    generate_answers,
    instruction_arguments,
    judge_answers,
    plot_runs,
    prepare_lora,
    read_rows,
    read_runs,
)
from heads.lora.rows import encode_prompt
from tests.support.models import save_tokenizer, tiny
from tests.support.ranks import in_two_processes

WORDS = ["<unk>", "<end>", "<pad>", *"abcdefghijklmnopqrstuvwxyz", "<user>", "<bot>"]
CHAT = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }}"
    "{{ ' <end> ' if m.role != 'user' else ' ' }}{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)


def tokenizer_in(folder, **changes):
    save_tokenizer(folder, WORDS, template=CHAT)
    return AutoTokenizer.from_pretrained(folder, **{"eos_token": "<end>"} | changes)


def plain(row):
    return row["instruction"], row["output"]


def rows_of(count=24, longest=6):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        size = int(torch.randint(2, longest, (), generator=generator))
        letters = [WORDS[3 + int(i)] for i in torch.randint(0, 26, (size,), generator=generator)]
        rows.append({"instruction": " ".join(letters), "output": " ".join(letters[::-1])})
    return rows


def test_alpacas_format():
    prompt, answer = alpaca_template({"instruction": "Add.", "input": "", "output": "2"})
    assert "### Input" not in prompt
    assert prompt.endswith("### Instruction:\nAdd.\n\n### Response:\n")
    assert answer == "2"
    assert (
        "### Input:\n1 1\n\n### Response:\n"
        in alpaca_template({"instruction": "Add.", "input": "1 1", "output": "2"})[0]
    )


def test_the_prompt_is_not_trained_and_the_end_is(tmp_path):
    tokenizer = tokenizer_in(tmp_path, pad_token="<end>")  # padding is the end token, as with GPT-2
    data = InstructionDataset([{"instruction": "a b", "output": "c"}, {"instruction": "d", "output": "e f g"}],
                              tokenizer, template=plain, progress=False)  # fmt: skip
    end = tokenizer.eos_token_id
    a = 3
    assert data[0] == {"input_ids": [a, a + 1, a + 2, end], "labels": [-100, -100, a + 2, end]}
    batch = InstructionCollator(pad_token_id=end)([data[0], data[1]])
    assert batch["labels"].tolist() == [[-100, -100, a + 2, end, -100], [-100, a + 4, a + 5, a + 6, end]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1] * 5]
    assert InstructionCollator(pad_token_id=end, pad_to_multiple_of=8)([data[0]])["input_ids"].shape == (1, 8)
    assert data.report.kept == 2
    assert data.report.answer_tokens == 6


def test_chat_templates(tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    template = ChatTemplate(tokenizer)
    said = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    messages = [{"role": role, "content": content} for role, content in said]
    assert template({"messages": messages}) == ("<user> a <bot> b <end> <user> c <bot> ", "d <end>")
    assert template({"instruction": "a", "input": "b", "output": "c"}) == ("<user> a\n\nb <bot> ", "c <end>")
    data = InstructionDataset([{"messages": messages}], tokenizer, template=template, progress=False)
    assert data[0]["labels"][-2:] == [6, tokenizer.eos_token_id]  # one end, not two
    assert sum(label != -100 for label in data[0]["labels"]) == 2
    assert data.texts[0][1] == "d"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTemplate(tokenizer)


def test_one_beginning_and_no_end_of_a_prompt(tmp_path):
    tokenizer = tokenizer_in(tmp_path, bos_token="<user>")
    processor = TemplateProcessing("<user> $A <end>", None, [("<user>", 29), ("<end>", 1)])
    tokenizer.backend_tokenizer.post_processor = processor
    assert encode_prompt(tokenizer, "a b") == encode_prompt(tokenizer, "<user> a b") == [29, 3, 4]
    data = InstructionDataset([{"instruction": "a", "output": "b"}], tokenizer, template=plain, progress=False)
    assert data[0]["input_ids"] == [29, 3, 4, 1]


def test_what_is_too_long_is_cut_and_counted(tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    long = "a b c d e f g h i j"
    texts = ((long, "x"), ("a", long), ("a", " "), (long, long))
    rows = [{"instruction": asked, "output": said} for asked, said in texts]
    for side, kept in (("left", [7, 8, 9, 10, 11, 12]), ("right", [3, 4, 5, 6, 7, 8])):
        data = InstructionDataset(
            rows, tokenizer, template=plain, max_length=8, truncation_side=side, min_prompt=3, progress=False
        )
        assert data[0]["input_ids"][:6] == kept
        assert data[0]["labels"][-2:] == [26, 1]
        assert len(data[1]["input_ids"]) == 8
        assert data[1]["labels"][-1] != 1  # its answer does not end here
        assert sum(label == -100 for label in data[2]["labels"]) == 3
        report = data.report
        assert (report.rows, report.kept, report.empty_answers) == (4, 3, 1)
        assert (report.prompts_cut, report.answers_cut) == (2, 2)
        assert "1 had an empty answer" in str(report)
    with pytest.raises(ValueError, match="none of 1 rows has an answer"):
        InstructionDataset(rows[2:3], tokenizer, template=plain, progress=False)


def test_bad_rows_are_refused_with_their_numbers(tmp_path):
    good = {"instruction": "a", "output": "b"}
    bad = [good, {"instruction": "a"}, 3, {"instruction": 1, "output": "b"}, *[{"output": "b"}] * 7, {"messages": "a"}]
    with pytest.raises(ValueError, match="read_rows: rows: ") as caught:
        read_rows(bad)
    text = str(caught.value)
    assert "no output in row 2;" in text
    assert "a int in row 3;" in text
    assert "instruction that is not text in row 4;" in text
    assert "no instruction in row 5, 6, 7, 8, 9 and 2 more;" in text
    assert "messages that are not a list of two or more roles and texts in row 12" in text
    path = tmp_path / "rows.json"
    for content in (json.dumps([good, good]), json.dumps(good) + "\n\n" + json.dumps(good) + "\n"):
        path.write_text(content)
        assert read_rows(path) == [good, good]
    path.write_text("[{]")
    with pytest.raises(ValueError, match="neither a JSON list nor JSON lines"):
        read_rows(path)
    path.write_text('{"instruction": "a\u2028b", "output": "c"}\n   \n')
    assert len(read_rows(path)) == 1
    for row in ({"instruction": None, "output": "a"}, {"instruction": "a", "output": None}):
        with pytest.raises(ValueError, match="that is not text in row 1"):
            read_rows([row])
    assert read_rows([{"question": "a"}], any_fields=True) == [{"question": "a"}]
    with pytest.raises(ValueError, match="has no rows"):
        read_rows([])
    tokenizer = tokenizer_in(tmp_path, eos_token=None)
    with pytest.raises(ValueError, match="has no end token"):
        InstructionDataset([good], tokenizer)
    tokenizer = tokenizer_in(tmp_path)
    for options, why in (
        ({"truncation_side": "up"}, "needed left or right"),
        ({"max_length": 2}, "max_length is 2"),
        ({"min_prompt": 600}, "min_prompt is 600"),
    ):
        with pytest.raises(ValueError, match=why):
            InstructionDataset([good], tokenizer, **options)
    with pytest.raises(ValueError, match=r"failed on row 2: alpaca_template: a row has .'messages'.; ChatTemplate"):
        InstructionDataset(
            [good, {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}], tokenizer
        )
    with pytest.raises(ValueError, match="made 'b' of row 1, needed"):
        InstructionDataset([good], tokenizer, template=lambda row: row["output"])
    with pytest.raises(ValueError, match="the last message is a user's"):
        ChatTemplate(tokenizer)({"messages": [{"role": r, "content": "a"} for r in ("assistant", "user")]})
    with pytest.raises(ValueError, match="pad_token_id is None"):
        InstructionCollator(pad_token_id=None)


def test_nothing_predicts_the_first_token_of_an_example(tmp_path):
    """Not even the end of the example before it, where there is no prompt."""
    rows = [{"instruction": "", "output": "a b"}, {"instruction": "", "output": "c"}]
    data = InstructionDataset(rows, tokenizer_in(tmp_path), template=plain, progress=False)
    assert data[1]["labels"] == [5, 1]
    batch = InstructionCollator(pad_token_id=1, pack=True)([data[0], data[1]])
    assert batch["labels"].tolist() == [[-100, 4, 1, -100, 1]]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3"])
def test_packed_examples_are_as_if_alone(kind, tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    data = InstructionDataset(rows_of(5), tokenizer, template=plain, progress=False)
    model = tiny(kind).double()
    check_packing(model)
    losses, gradients = [], []
    for pack in (False, True):
        batch = InstructionCollator(pad_token_id=1, pack=pack)([data[i] for i in range(5)])
        assert batch["input_ids"].shape[0] == (1 if pack else 5)
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*losses)
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, msg=name)


def test_a_model_in_which_packed_examples_see_each_other_is_refused():
    class Forgetful(torch.nn.Module):
        """Ignores positions, as a recurrent model does."""

        def __init__(self):
            super().__init__()
            self.inner = tiny("llama")

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, position_ids, use_cache):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    with pytest.raises(ValueError, match="in Forgetful packed examples see each other"):
        check_packing(Forgetful())
    with pytest.raises(ValueError, match=r"BertForSequenceClassification gives \[1, 3\] for 16 tokens"):
        check_packing(tiny("classifier"))


def trained(folder, out, **changes):
    """A tiny model tuned for a few steps, under a seed."""
    tokenizer = tokenizer_in(folder)
    data = InstructionDataset(rows_of(), tokenizer, template=plain, progress=False)
    torch.manual_seed(0)
    targets, dropout = ["q_proj", "v_proj", "down_proj"], changes.pop("dropout", 0.1)
    model = prepare_lora(tiny("llama"), LoraConfig(target_modules=targets, r=4, lora_dropout=dropout))
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True,
               "learning_rate": 1e-2, "save_steps": 3, "seed": 3}  # fmt: skip
    ratio, resume = changes.pop("ratio", None), changes.pop("resume", None)
    trainer = InstructionTrainer(
        model=model, args=instruction_arguments(out, **options | changes), train_dataset=data,
        data_collator=InstructionCollator(pad_token_id=1), loraplus_lr_ratio=ratio,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer):
    return {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}


def test_a_resumed_run_is_as_if_it_had_not_stopped(tmp_path):
    whole = trained(tmp_path, tmp_path / "a", ratio=4.0)
    again = trained(tmp_path, tmp_path / "b", ratio=4.0, resume=str(tmp_path / "a" / "checkpoint-3"))
    assert again.state.global_step == 6
    finished = trained(tmp_path, tmp_path / "b", ratio=4.0, resume=str(tmp_path / "b" / "checkpoint-6"))
    assert finished.state.global_step == 6
    for name, value in state_of(whole).items():
        assert torch.equal(state_of(again)[name], value), name
        assert torch.equal(state_of(finished)[name], value), name


def test_the_rate_warms_up_and_falls_to_a_floor(tmp_path):
    trainer = trained(tmp_path, tmp_path / "a", logging_steps=1, warmup_steps=2, max_steps=10)
    rates = [r["learning_rate"] for r in trainer.state.log_history if "loss" in r]
    assert rates[:3] == pytest.approx([0.0, 5e-3, 1e-2])
    assert min(rates[2:]) >= 1e-3
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_first_gradient_that_is_too_large_is_clipped(tmp_path):
    found = []
    for clip in (1e-4, 1e9):
        trainer = trained(tmp_path, tmp_path / "a", max_steps=1, optim="sgd", learning_rate=1.0, warmup_steps=0,
                          max_grad_norm=clip, dropout=0.0, save_strategy="no")  # fmt: skip
        moved = state_of(trainer)
        start = state_of(trained(tmp_path, tmp_path / "a", max_steps=1, optim="sgd", learning_rate=0.0, warmup_steps=0,
                                 dropout=0.0, save_strategy="no"))  # fmt: skip
        found.append(float(sum((moved[n] - v).square().sum() for n, v in start.items())) ** 0.5)
    assert found[0] == pytest.approx(1e-4, rel=1e-2)
    assert found[1] > 1e-3


def test_accumulation_gives_the_same_step(tmp_path):
    whole = state_of(trained(tmp_path, tmp_path / "a", **SGD))
    parts = state_of(
        trained(tmp_path, tmp_path / "b", **SGD, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    )
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_another_schedule_takes_none_of_the_recipes_options(tmp_path):
    trained(tmp_path, tmp_path / "a", max_steps=1, lr_scheduler_type="linear", save_strategy="no")


def test_lora_plus_gives_b_its_own_rate(tmp_path):
    trainer = trained(tmp_path, tmp_path / "a", ratio=16.0, weight_decay=0.1)
    found = {}
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            found["B" if "lora_B" in names[id(parameter)] else "A"] = (group["initial_lr"], group["weight_decay"])
    assert found == {"A": (1e-2, 0.1), "B": (pytest.approx(0.16), 0.1)}
    with pytest.raises(ValueError, match="needed at least 1"):
        trained(tmp_path, tmp_path / "b", ratio=0.5)
    with pytest.raises(ValueError, match="has no lora_B"):
        InstructionTrainer(
            model=tiny("llama"), args=instruction_arguments(tmp_path, use_cpu=True), loraplus_lr_ratio=2.0
        )
    with pytest.raises(ValueError, match="nothing is trainable"):
        InstructionTrainer(
            model=tiny("llama").requires_grad_(False), args=instruction_arguments(tmp_path, use_cpu=True)
        )


SGD = {"optim": "sgd", "learning_rate": 0.5, "save_strategy": "no", "dropout": 0.0}  # dropout is each process's own
RANK = """
from pathlib import Path
from tests.heads.lora.test_instruct import SGD, state_of, trained
out, rank = Path(out), os.environ["RANK"]
trainer = trained(out / f"words{rank}", out / "run", ddp_backend="gloo", per_device_train_batch_size=2, **SGD)
torch.save(state_of(trainer), out / f"state{rank}.pt")
"""


def test_two_processes_give_what_one_gives(tmp_path):
    """Answers are of different lengths: the loss is a mean over the tokens of a whole step."""
    in_two_processes(RANK, tmp_path)
    found = [torch.load(tmp_path / f"state{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    start = state_of(trained(tmp_path, tmp_path / "none", **SGD | {"learning_rate": 0.0}))
    single = state_of(trained(tmp_path, tmp_path / "one", **SGD))
    for name, value in single.items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert any((value - start[name]).abs().max() > 1e-2 for name, value in single.items())


def test_the_loss_is_of_tokens_whatever_the_batch(tmp_path):
    data = InstructionDataset(rows_of(9), tokenizer_in(tmp_path), template=plain, progress=False)
    model = tiny("llama")
    found = [
        answer_loss(model, data, InstructionCollator(pad_token_id=1, pack=pack), batch_size=size, progress=False)
        for size, pack in ((1, False), (4, False), (9, True))
    ]
    total = count = 0.0
    for example in data:
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"][1:])
        logs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), -1)
        kept = labels != -100
        total -= float(logs[kept].gather(1, labels[kept, None]).sum().detach())
        count += int(kept.sum())
    for loss, perplexity in found:
        assert loss == pytest.approx(total / count, rel=1e-5)
        assert perplexity == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)


def test_answers_do_not_depend_on_their_neighbours(tmp_path):
    tokenizer, model = tokenizer_in(tmp_path), tiny("llama")
    prompts = ["a b c d e f", "g", "h i"]
    together = generate_answers(model, tokenizer, prompts, max_new_tokens=5, progress=False)
    alone = [generate_answers(model, tokenizer, [p], max_new_tokens=5, progress=False)[0] for p in prompts]
    assert together == alone
    assert all(len(text.split()) <= 5 for text in together)
    with pytest.raises(ValueError, match="prompts is one text"):
        generate_answers(model, tokenizer, "a b")
    with pytest.warns(UserWarning, match="1 prompts were cut to 4 tokens, on the right"):
        cut = generate_answers(model, tokenizer, prompts, max_new_tokens=60, truncation_side="right", progress=False)
    assert cut[0] == generate_answers(model, tokenizer, ["a b c d"], max_new_tokens=60, progress=False)[0]
    with pytest.raises(ValueError, match="70 new tokens in a context of 64"):
        generate_answers(model, tokenizer, prompts, max_new_tokens=70)
    norm = model.model.norm.train()
    generate_answers(model, tokenizer, ["a"], max_new_tokens=1, progress=False)
    assert norm.training
    assert not model.training


def test_judges(tmp_path):
    judge = ReferenceOverlap({"p": "the cat sat on the mat"})
    assert judge("p", "The cat sat on the mat.") == 100
    assert judge("p", "dogs") == judge("p", "") == 0
    assert judge("p", "the mat") == pytest.approx(50.0)  # 2 of 2 and 2 of 6 words
    with pytest.raises(ValueError, match="no reference for the prompt 'q'"):
        judge("q", "a")
    tokenizer, model = tokenizer_in(tmp_path), tiny("llama")
    likely = ModelLikelihood(model, tokenizer)
    logs = torch.log_softmax(model(input_ids=torch.tensor([[3, 4, 5]])).logits[0].double(), -1)
    assert likely("a", "b c") == pytest.approx(100 * float(((logs[0, 4] + logs[1, 5]) / 2).exp().detach()), rel=1e-4)
    assert likely("a", "") == 0
    with pytest.raises(ValueError, match="the judge gave 101"):
        judge_answers(lambda p, a: 101, ["a"], ["b"], progress=False)
    with pytest.raises(ValueError, match="1 prompts and 0 answers"):
        judge_answers(judge, ["a"], [])


def test_the_table_of_runs(tmp_path):
    path = tmp_path / "new" / "runs.csv"
    values = {
        "name": "one, two",
        "model": "m",
        "data": "d",
        "batch": 2,
        "epochs": 1.0,
        "optimizer": "adamw",
        "lr": 1e-4,
    }
    values |= {"min_lr": 1e-5, "warmup": 0.2, "weight_decay": 0.1, "rank": 16, "alpha": 16.0}
    values |= {"loss": 1.5, "perplexity": 4.5, "judge": 30.0, "seconds": 9.0}
    append_run(path, Run(**values))
    append_run(path, Run(**values | {"rank": None, "alpha": None, "judge": None}))
    rows = read_runs(path)
    assert [row["rank"] for row in rows] == ["16", ""]
    assert rows[0]["name"] == "one, two"
    plot_runs(path).savefig(tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 5000
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["other"])
    with pytest.raises(ValueError, match=r"has the columns \['other'\]"):
        append_run(path, Run(**values))
