"""Models with different vocabularies: rows follow their tokens."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

import mergekit_lite.engine.eager
from mergekit_lite import PlanError, load_recipe, make_plan, merge_models
from mergekit_lite.vocabulary import read_vocabulary
from tests.support.models import save, save_tokenizer, tiny

COMMON = [f"w{i}" for i in range(20)]
WORDS = {
    "base": ["<unk>", *COMMON, "only-base"],
    "x": ["<unk>", *reversed(COMMON), "only-x", "shared-xy"],
    "y": ["<unk>", "shared-xy", *COMMON],
}


@pytest.fixture
def folders(tmp_path):
    for number, (name, words) in enumerate(WORDS.items()):
        rows = len(words) + (5 if name == "base" else 0)  # the base's embedding is padded
        save(tiny("llama", number, vocab_size=rows), tmp_path / name)
        save_tokenizer(tmp_path / name, words)
    return {name: str(tmp_path / name) for name in WORDS}


def merge(folders, out, extra, method="linear", dtype="float32"):
    base = f"base_model: {folders['base']}\n" if method != "linear" else ""
    models = [folders["base"]] if method == "linear" else []
    models += [folders["x"], folders["y"]]
    text = (
        f"merge_method: {method}\n{base}models: {json.dumps(models)}\nparameters: {{weight: "
        f"1}}\n{extra}\n"
    )
    merge_models(load_recipe(text), out=out, progress=False)
    return load_file(out / "model.safetensors")


def row(folders, name, token, tensor="model.embed_tokens.weight"):
    return load_file(f"{folders[name]}/model.safetensors")[tensor][WORDS[name].index(token)]


def test_the_tokenizers_source_is_an_argument_and_other_keys_of_recipes_are_not(folders, tmp_path):
    text = "merge_method: linear\nparameters: {weight: 1}\ntokenizer_source: union\nmodels:\n"
    text += "".join(f"- {{model: {folder}}}\n" for folder in folders.values())
    merge_models(load_recipe(text), out=tmp_path / "recipe", progress=False)
    merge_models(
        list(folders.values()),
        weight=1,
        tokenizer_source="union",
        out=tmp_path / "call",
        progress=False,
    )
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "call" / name).read_bytes() == (tmp_path / "recipe" / name).read_bytes()
    with pytest.raises(ValueError, match="got the recipe key chat_template"):
        merge_models(list(folders.values()), chat_template="auto", out=tmp_path / "no")
    for misplaced in ("modules", "tokenizer_"):
        with pytest.raises(ValueError, match=f"got the recipe key {misplaced}"):
            merge_models(list(folders.values()), **{misplaced: {}}, out=tmp_path / "no")
    with pytest.raises(
        ValueError, match="expected no tokenizer_source together with a MergeRecipe"
    ):
        merge_models(load_recipe(text), tokenizer_source="base", out=tmp_path / "no")


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("chunk", [1 << 18, 24])
def test_a_union_matches_rows_by_token(folders, tmp_path, tensor, chunk, monkeypatch):
    monkeypatch.setattr(mergekit_lite.engine.eager, "EAGER_STRETCH", chunk)
    merged = merge(folders, tmp_path / "out", "tokenizer_source: union")[tensor]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    at = tokenizer.get_vocab()
    assert {*WORDS["base"], *WORDS["x"], *WORDS["y"]} <= set(at)
    for token in ("w0", "w7", "<unk>"):
        rows = [row(folders, name, token, tensor) for name in WORDS]
        torch.testing.assert_close(merged[at[token]], sum(rows) / 3)
    only_base, only_x = (row(folders, n, f"only-{n}", tensor) for n in ("base", "x"))
    torch.testing.assert_close(merged[at["only-base"]], only_base)  # the others take the base's row
    # one has it: the mean of those that have it
    torch.testing.assert_close(merged[at["only-x"]], only_x)
    shared = (row(folders, "x", "shared-xy", tensor) + row(folders, "y", "shared-xy", tensor)) / 2
    torch.testing.assert_close(merged[at["shared-xy"]], (shared + 2 * shared) / 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    # the base's padding holds the two new tokens
    assert model.config.vocab_size == merged.shape[0] == 27
    assert tokenizer("w3 only-x shared-xy")["input_ids"] == [
        at["w3"],
        at["only-x"],
        at["shared-xy"],
    ]


def test_the_base_vocabulary_keeps_the_base_padding(folders, tmp_path):
    merged = merge(folders, tmp_path / "out", "tokenizer_source: base", "task_arithmetic")
    embedding = merged["model.embed_tokens.weight"]
    assert embedding.shape[0] == len(WORDS["base"]) + 5
    expected = sum(row(folders, n, "w4") for n in ("x", "y")) - row(folders, "base", "w4")
    torch.testing.assert_close(embedding[WORDS["base"].index("w4")], expected)


def test_padding_a_source_path_and_placed_tokens(folders, tmp_path):
    placed = f"tokens: {{w2: {{source: {folders['y']}, force: true}}}}"
    spec = f"tokenizer: {{source: {folders['x']}, pad_to_multiple_of: 8, {placed}}}"
    merged = merge(folders, tmp_path / "out", spec)["model.embed_tokens.weight"]
    assert merged.shape[0] == 24
    torch.testing.assert_close(merged[WORDS["x"].index("w2")], row(folders, "y", "w2"))
    at = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert at == {w: i for i, w in enumerate(WORDS["x"])}


def test_bad_token_rules(folders, tmp_path):
    for spec, message in [
        ("tokens: {w2: {force: true}}", "expected a source together with force: true, got none"),
        ("tokens: {w2: {source: elsewhere}}", "expected one of the recipe's models as source"),
        (f"tokens: {{only-x: {{source: {folders['y']}}}}}", "has no token 'only-x'"),
    ]:
        with pytest.raises(PlanError, match=message):
            merge(folders, tmp_path / "out", f"tokenizer: {{source: union, {spec}}}")
    assert not (tmp_path / "out").exists()


def test_a_union_of_bpe_vocabularies_brings_the_merges(tmp_path):
    """A token that nothing could produce would be a dead row."""
    letters = list("abcdef")
    for name, merges in (("p", [("a", "b")]), ("q", [("c", "d"), ("cd", "e")])):
        vocabulary = letters + ["".join(m) for m in merges]
        made = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, merges))
        save(tiny("llama", len(merges), vocab_size=len(vocabulary)), tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / name)
    text = (
        f"merge_method: linear\nmodels: [{tmp_path}/p, {tmp_path}/q]\nparameters: {{weight: 1}}\n"
    )
    merge_models(
        load_recipe(text + "tokenizer_source: union\n"), out=tmp_path / "out", progress=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("abcdef") == ["ab", "cde", "f"]


def test_chat_templates(folders, tmp_path):
    for name, template in (("base", "A {{ x }}"), ("x", "B {{ x }}"), ("y", "B {{ x }}")):
        save_tokenizer(tmp_path / name, WORDS[name], template=template)
    for number, (asked, expected) in enumerate(
        [("auto", "B {{ x }}"), ("'C {{ y }}'", "C {{ y }}")]
    ):
        out = tmp_path / f"out{number}"
        merge(folders, out, f"tokenizer_source: base\nchat_template: {asked}")
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template == expected


@pytest.mark.parametrize("new", [[], ["x", "y"]])
def test_a_union_has_no_token_without_a_row(tmp_path, new):
    """The tokenizers know four tokens more than the embeddings have rows."""
    words = ["<unk>", "a", "b"]
    extra = [f"<extra-{k}>" for k in range(4)]
    for seed, (name, own) in enumerate({"p": words, "q": words + new}.items()):
        save(tiny("llama", seed, vocab_size=len(own)), tmp_path / name)
        save_tokenizer(tmp_path / name, own, special=extra)
    models = [f"{tmp_path}/p", f"{tmp_path}/q"]
    recipe = load_recipe(
        json.dumps(
            {
                "merge_method": "linear",
                "models": models,
                "parameters": {"weight": 1},
                "tokenizer_source": "union",
            }
        )
    )
    plan = make_plan(recipe)
    assert any("4 tokens" in note and "<extra-0>" in note for note in plan.notes)
    merge_models(recipe, out=tmp_path / "out", progress=False)
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert len(rows) == len(words) + len(new)
    at = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    theirs = load_file(tmp_path / "q" / "model.safetensors")["model.embed_tokens.weight"]
    for token in new:
        torch.testing.assert_close(rows[at[token]], theirs[(words + new).index(token)])


def test_special_tokens_keep_their_rows_in_a_union(tmp_path):
    """The base's added tokens lie after its vocabulary; new tokens must not push them on."""
    words = {"p": ["<unk>", "a", "b"], "q": ["<unk>", "b", "a", "c", "d"]}
    for seed, name in enumerate(words):
        save(tiny("llama", seed, vocab_size=len(words[name]) + 2), tmp_path / name)
        save_tokenizer(tmp_path / name, words[name], special=["<sys>", f"<only-{name}>"])
    text = (
        f"merge_method: linear\nmodels: [{tmp_path}/p, {tmp_path}/q]\nparameters: {{weight: 1}}\n"
    )
    merge_models(
        load_recipe(text + "tokenizer_source: union\n"), out=tmp_path / "out", progress=False
    )
    merged = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    at = merged.get_vocab()
    assert {t: at[t] for t in ("<unk>", "a", "b", "<sys>", "<only-p>")} == {
        "<unk>": 0,
        "a": 1,
        "b": 2,
        "<sys>": 3,
        "<only-p>": 4,
    }
    assert sorted(at.values()) == list(range(8))
    assert merged.tokenize("a <sys> d <only-q>") == ["a", "<sys>", "d", "<only-q>"]
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    theirs = load_file(tmp_path / "q" / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(rows[at["d"]], theirs[4])
    torch.testing.assert_close(rows[at["<only-q>"]], theirs[6])


def write(folder, vocabulary, tied, **tables):
    folder.mkdir()
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(folder / "tokenizer.json"))
    save_file(
        {
            f"{name.replace('__', '.')}.weight": torch.tensor(rows)[:, None]
            for name, rows in tables.items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": tied})
    )


def test_a_tied_model_gives_the_head_of_a_token_that_the_untied_one_lacks(tmp_path):
    rows = {"model__embed_tokens": [1.0, 1.0], "lm_head": [10.0, 10.0]}
    write(tmp_path / "untied", {"a": 0, "b": 1}, False, **rows)
    write(tmp_path / "tied", {"a": 0, "b": 1, "x": 2}, True, model__embed_tokens=[4.0, 4.0, 4.0])
    text = (
        f"merge_method: linear\nmodels: [{tmp_path}/untied, {tmp_path}/tied]\nparameters: "
        "{weight: 1}\n"
    )
    merged = merge_models(load_recipe(text + "tokenizer_source: union"), progress=False)
    assert merged["lm_head.weight"].tolist() == [[7.0], [7.0], [4.0]]


def test_ids_with_a_gap_past_the_embedding(tmp_path):
    write(tmp_path / "m", {"a": 0, "b": 1, "z": 4}, True, model__embed_tokens=[1.0, 3.0])
    text = f"merge_method: passthrough\nmodels: [{tmp_path}/m]\ntokenizer_source: base"
    with pytest.warns(UserWarning, match="1 tokens .* no row in its model and are left out: z"):
        merged = merge_models(load_recipe(text), progress=False)["model.embed_tokens.weight"]
    assert merged.flatten().tolist() == [1.0, 3.0]


@pytest.mark.parametrize("source", ["base", "union"])
def test_tokens_without_rows_are_not_in_the_tokenizer_either(source, tmp_path):
    for name in ("a", "b"):
        save(tiny("llama", vocab_size=20), tmp_path / name)
        save_tokenizer(tmp_path / name, [f"t{i}" for i in range(24 if name == "a" else 20)])
    models = [tmp_path / "a", tmp_path / "b"]
    out = tmp_path / "out"
    options = {"weight": 0.5, "tokenizer_source": source, "out": out, "progress": False}
    report = merge_models(models, "linear", **options)
    assert "4 tokens of the tokenizer have no row in" in str(report)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == {f"t{i}": i for i in range(20)}
    assert load_file(out / "model.safetensors")["model.embed_tokens.weight"].shape[0] == 20


def test_files_that_cannot_lose_tokens_are_copied_with_a_note(tmp_path):
    for name in ("a", "b"):
        save(tiny("llama", vocab_size=3), tmp_path / name)
        (tmp_path / name / "vocab.txt").write_text("[UNK]\nx\ny\nz\n")
    models = [tmp_path / "a", tmp_path / "b"]
    options = {"weight": 0.5, "tokenizer_source": "base", "out": tmp_path / "out"}
    report = merge_models(models, "linear", progress=False, **options)
    assert "1 tokens of the tokenizer have no row" in str(report)
    assert "files keep the tokens that have no row" in str(report)


@pytest.mark.parametrize("kind", ["separator", "added_tokens.json", "added_tokens_decoder"])
def test_ids_outside_tokenizer_json_are_those_of_transformers(kind, tmp_path):
    """Rows follow the tokens of files without a tokenizer.json."""
    expected = {"a": 0, "b": 1, "c": 2, "d": 3}
    if kind == "separator":  # str.splitlines would split at it, too
        expected = {"a": 0, "\u2028": 1, "c": 2, "d": 3}
        (tmp_path / "vocab.txt").write_text("\n".join(expected) + "\n", encoding="utf-8")
    elif kind == "added_tokens.json":
        (tmp_path / "vocab.txt").write_text("a\nb\n")
        (tmp_path / kind).write_text(json.dumps({"d": 3, "c": 2}))
    else:
        (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
        added = {"3": {"content": "d"}, "2": {"content": "c"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({kind: added}))
    assert read_vocabulary(tmp_path, "m") == expected


FIRST = """
merge_method: linear
models: [{base}, {x}]
parameters: {{weight: 1}}
tokenizer_source: union
"""
SECOND = """
merge_method: linear
models: [{first}, {y}]
parameters: {{weight: 1}}
tokenizer: {{source: {first}}}
"""


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_stage_is_the_tokenizer_s_source(folders, tmp_path, in_memory):
    merge_models(load_recipe(FIRST.format(**folders)), out=tmp_path / "first", progress=False)
    second = load_recipe(SECOND.format(first=tmp_path / "first", **folders))
    merge_models(second, out=tmp_path / "two", progress=False)
    stages = f"name: First\n{FIRST}---\n{SECOND}".format(first="First", **folders)
    recipe = load_recipe(stages)
    expected = load_file(tmp_path / "two" / "model.safetensors")
    if in_memory:
        merged = merge_models(recipe, progress=False)
    else:
        merge_models(recipe, out=tmp_path / "one", progress=False)
        merged = load_file(tmp_path / "one" / "model.safetensors")
        names = ("tokenizer.json", "config.json")
        for name in names:
            assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name])


def test_a_stage_that_is_no_model_is_no_tokenizer_s_source(folders):
    stages = f"name: First\n{FIRST}---\n{SECOND}".format(first="First", **folders)
    with pytest.raises(PlanError, match="expected one of the recipe's models, got the stage First"):
        make_plan(load_recipe(stages.replace("models: [First, ", f"models: [{folders['x']}, ")))


def test_truncated_vocabularies_have_the_fewest_rows(folders, tmp_path):
    paths = list(folders.values())
    with pytest.raises(PlanError, match="vocabularies differ"):
        merge_models(paths, weight=1, progress=False)
    out = tmp_path / "out"
    report = merge_models(paths, weight=1, truncate_embeddings=True, out=out, progress=False)
    assert any("cut to 22 rows" in note for note in report.notes)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 22
    inputs = [load_file(f"{path}/model.safetensors") for path in paths]
    merged = load_file(out / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(merged[name], sum(state[name][:22] for state in inputs) / 3)
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_a_mean_before_a_models_first_row(tmp_path):
    """The code of a mean, -1, is no row that row 0 could follow."""
    for name, tokens, rows in (
        ("p", {"<pad>": 0, "a": 1, "b": 2}, [100.0, 1.0, 1.0]),
        ("q", {"a": 0, "b": 1}, [3.0, 3.0]),
    ):
        (tmp_path / name).mkdir()
        Tokenizer(models.WordLevel(tokens, unk_token="a")).save(
            str(tmp_path / name / "tokenizer.json")
        )
        state = {"model.embed_tokens.weight": torch.tensor(rows)[:, None]}
        save_file(state, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"tie_word_embeddings": true}')
    recipe = load_recipe(
        f"merge_method: linear\nmodels: [{tmp_path}/p, {tmp_path}/q]\nparameters: {{weight: 1}}\n"
        "tokenizer_source: base"
    )
    merged = merge_models(recipe, progress=False)["model.embed_tokens.weight"]
    assert merged.flatten().tolist() == [100.0, 2.0, 2.0]
