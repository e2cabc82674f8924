"""Data-driven merges: against least squares, against a dense merge of whole models, and killed and
resumed."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mergekit_lite.layerwise
from mergekit_lite import merge_models
from mergekit_lite.__main__ import main
from mergekit_lite.computing import readable_tokens
from mergekit_lite.layerwise import CalibratedMerge, InputStatistics, merge_by_inputs
from mergekit_lite.layerwise.blocks import linear_layers
from mergekit_lite.methods import CALIBRATED
from tests.mergekit_lite.layerwise import reference
from tests.support import equivalence
from tests.support.models import auto_class, save, save_tokenizer, tiny

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def pair(kind, folder, dtype=torch.float32, count=2):
    return [save(tiny(kind, seed), folder / str(seed), dtype) for seed in range(count)]


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(5, 20, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 90, (n,), generator=generator).tolist()} for n in sizes]


DATA = [examples(11, 1), examples(9, 2)]


def statistics_of(x):
    found = InputStatistics(x.shape[1])
    for part in x.split(7):
        found.add(part)
    return found


@pytest.mark.parametrize("reduce", [0.0, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.8)])
def test_the_streamed_solution_is_the_definition(reduce, shares):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 5, generator=generator) for _ in range(2)]
    inputs = [torch.randn(40, 5, generator=generator) * (k + 1) for k in range(2)]
    seen = [statistics_of(x) for x in inputs]
    found = merge_by_inputs(weights, seen, reduce=reduce, shares=shares)
    expected = reference.regmean(weights, inputs, reduce=reduce, weight=shares)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_inputs_that_are_always_zero_need_no_other_solver(monkeypatch):
    def fail(*given, **named):
        raise AssertionError("the matrix is not positive definite")

    monkeypatch.setattr(torch.linalg, "lstsq", fail)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 5, generator=generator) for _ in range(2)]
    inputs = [torch.randn(40, 5, generator=generator) for _ in range(2)]
    for x in inputs:
        x[:, 2] = 0
    found = merge_by_inputs(
        weights, [statistics_of(x) for x in inputs], reduce=0.9, shares=(0.5, 0.5)
    )
    # of what no input says, the average
    torch.testing.assert_close(found[:, 2], (weights[0] + weights[1])[:, 2].double() / 2)


def test_with_whole_gram_matrices_it_is_least_squares():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 5, generator=generator).double() for _ in range(3)]
    inputs = [torch.randn(30, 5, generator=generator).double() for _ in range(3)]
    outputs = torch.cat([x @ w.T for x, w in zip(inputs, weights, strict=True)])
    nearest = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.T
    torch.testing.assert_close(reference.regmean(weights, inputs, reduce=1.0), nearest)


def test_inputs_that_nobody_has_are_averaged():
    weights = [torch.ones(2, 3), 3 * torch.ones(2, 3)]
    x = torch.tensor([[1.0, 0.0, 0.0]] * 4)
    seen = [statistics_of(x), statistics_of(0 * x)]
    found = merge_by_inputs(weights, seen, reduce=0.9, shares=(0.5, 0.5))
    torch.testing.assert_close(found[:, 1:].float(), torch.full((2, 2), 2.0))
    # who has it decides
    torch.testing.assert_close(found[:, 0].float(), torch.ones(2), rtol=1e-4, atol=1e-4)
    none = [statistics_of(0 * x) for _ in range(2)]
    torch.testing.assert_close(
        merge_by_inputs(weights, none, reduce=0.9, shares=(0.5, 0.5)).float(),
        torch.full((2, 3), 2.0),
    )


def dense(paths, kind, data, method, reduce=0.9):
    """Whole models in memory, hooks on every layer; through the merged model so far where the
    method says so."""
    models = [auto_class(kind).from_pretrained(p).eval() for p in paths]
    merged = auto_class(kind).from_pretrained(paths[0]).eval()
    with torch.no_grad():
        for own, *others in zip(
            merged.parameters(), *(m.parameters() for m in models), strict=True
        ):
            own.copy_(torch.stack(others).double().mean(0))
    blocks = [
        next(m for _, m in x.named_modules() if isinstance(m, torch.nn.ModuleList))
        for x in (merged, *models)
    ]
    heads = [m.get_output_embeddings() for m in (merged, *models)]

    if CALIBRATED[method].merged_inputs:  # data meet the merged embeddings and norms
        own = dict(merged.named_parameters())
        for model in models:
            for name, parameter in model.named_parameters():
                if (
                    not any(parameter is p for b in blocks for p in b.parameters())
                    and "lm_head" not in name
                ):
                    parameter.data.copy_(own[name])

    def inputs(model, layer, rows):
        seen = []
        handle = layer.register_forward_pre_hook(
            lambda _, given: seen.append(given[0].reshape(-1, given[0].shape[-1]))
        )
        with torch.no_grad():
            for row in rows:
                model(input_ids=torch.tensor([row["input_ids"]]))
        handle.remove()
        return torch.cat(seen)

    def solve(own, theirs, seen):
        turned = type(own).__name__ == "Conv1D"
        weights = [t.weight.T if turned else t.weight for t in theirs]
        found = reference.DEFINITIONS[method](weights, seen, reduce=reduce)
        own.weight.data.copy_(found.T if turned else found)

    for number in range(len(blocks[0])):
        runs, start = [], [b[number] for b in blocks[1:]]
        for k, model in enumerate(models):
            # this block of the model, on what the merged blocks before it give
            if CALIBRATED[method].merged_inputs:
                kept = [blocks[k + 1][i] for i in range(number)]
                for i in range(number):
                    blocks[k + 1][i] = blocks[0][i]
                own = linear_layers(start[k])
                runs.append({n: inputs(model, layer, data[k]) for n, layer in own.items()})
                for i in range(number):
                    blocks[k + 1][i] = kept[i]
            else:
                own = linear_layers(start[k])
                runs.append({n: inputs(model, layer, data[k]) for n, layer in own.items()})
        for name, layer in linear_layers(blocks[0][number]).items():
            solve(layer, [linear_layers(s)[name] for s in start], [r[name] for r in runs])
    if CALIBRATED[method].merged_inputs:
        for own in blocks[1:]:
            for i in range(len(own)):
                own[i] = blocks[0][i]
    if heads[0].weight is not merged.get_input_embeddings().weight:
        solve(
            heads[0],
            heads[1:],
            [inputs(m, h, d) for m, h, d in zip(models, heads[1:], data, strict=True)],
        )
    return merged


@pytest.mark.parametrize(
    ("kind", "readable"),
    [("gpt2", 64), ("roberta", 62), ("llama", 100), ("bert", 64)],
)
def test_rows_are_cut_to_the_positions_of_a_model(kind, readable):
    config = tiny(kind).config
    positions = {"gpt2": "n_positions", "roberta": "max_position_embeddings"}
    setattr(config, positions.get(kind, "max_position_embeddings"), 64)
    config.pad_token_id = {"roberta": 1}.get(kind)
    assert readable_tokens(config, 100) == readable
    assert readable_tokens(config, 10) == 10
    config.max_position_embeddings = -1  # as XLNet's, which has no limit
    assert readable_tokens(config, 100) == 100


def test_every_data_driven_method_has_a_definition():
    assert set(reference.DEFINITIONS) == set(CALIBRATED)


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("kind", ["llama-tied", "llama", "gpt2", "gemma3", "qwen2", "bloom"])
def test_block_by_block_is_the_dense_merge(kind, method, tmp_path, monkeypatch):
    paths = pair(kind, tmp_path)
    save_tokenizer(tmp_path / "0", [f"t{i}" for i in range(96)])
    merged_source = mergekit_lite.layerwise.merged_source
    seconds_of_blocks = []

    def timed(*args, **options):
        begin = time.perf_counter()
        source = merged_source(*args, **options)
        seconds_of_blocks.append(time.perf_counter() - begin)
        return source

    monkeypatch.setattr(mergekit_lite.layerwise, "merged_source", timed)
    report = merge_models(
        paths,
        method,
        calibration=DATA,
        out=tmp_path / "out",
        batch_size=4,
        device=equivalence.DEVICE,
        progress=False,
    )
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert report.bytes_written > 0
    assert seconds_of_blocks[0] <= report.seconds
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "out"]  # no stage is left
    found = auto_class(kind).from_pretrained(tmp_path / "out").eval()
    expected = dense(paths, kind, DATA, method)
    for (name, value), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            value, other, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_it_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    from mergekit_lite.layerwise.run import BlockMerge

    paths = pair("llama", tmp_path)
    options = {"calibration": DATA, "device": equivalence.DEVICE, "progress": False}
    merge_models(paths, "regmean", out=tmp_path / "whole", **options)
    blocks, real = [], BlockMerge.merge_block

    def killed(self, number):
        if number == 2 and len(blocks) == 2:
            raise KeyboardInterrupt
        blocks.append(number)
        real(self, number)

    monkeypatch.setattr(BlockMerge, "merge_block", killed)
    with pytest.raises(KeyboardInterrupt):
        merge_models(paths, "regmean", out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    blocks.append("killed")
    merge_models(paths, "regmean", out=tmp_path / "out", **options)
    assert blocks == [0, 1, "killed", 2, 3]
    same = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "out")]
    assert same[0] == same[1]


@pytest.mark.parametrize("harm", ["remove", "zero", "plant"])
def test_a_block_that_was_removed_or_changed_is_merged_again(harm, tmp_path, monkeypatch):
    from mergekit_lite.layerwise.run import BlockMerge

    paths = pair("llama", tmp_path)
    merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "whole", progress=False)
    real = BlockMerge.merge_block

    def killed(self, number):
        if number == 2:
            raise KeyboardInterrupt
        real(self, number)

    monkeypatch.setattr(BlockMerge, "merge_block", killed)
    with pytest.raises(KeyboardInterrupt):
        merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    monkeypatch.setattr(BlockMerge, "merge_block", real)
    (part,) = tmp_path.glob(".out*/**/part-00001.safetensors")
    whole = part.read_bytes()
    if harm == "remove":
        part.unlink()
    elif harm == "zero":
        part.write_bytes(whole[:-64] + bytes(64))
    else:
        shutil.copyfile(part, part.with_name("part-00009.safetensors"))
    merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    same = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "out")]
    assert same[0] == same[1]


def test_what_was_begun_with_other_data_is_not_taken_up(tmp_path, monkeypatch):
    from mergekit_lite.layerwise.run import BlockMerge

    paths, blocks, real = pair("llama", tmp_path), [], BlockMerge.merge_block

    def counted(self, number):
        if blocks == [0]:
            blocks.append("killed")
            raise KeyboardInterrupt
        blocks.append(number)
        real(self, number)

    monkeypatch.setattr(BlockMerge, "merge_block", counted)
    with pytest.raises(KeyboardInterrupt):
        merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    merge_models(paths, "regmean", calibration=DATA[::-1], out=tmp_path / "out", progress=False)
    assert blocks == [0, "killed", 0, 1, 2, 3]


def test_text_is_read_by_the_models_tokenizer(tmp_path):
    paths = pair("llama", tmp_path)
    for k in range(2):
        save_tokenizer(tmp_path / str(k), [f"t{i}" for i in range(96)])
    (tmp_path / "a.txt").write_text(" ".join(f"t{i % 90}" for i in range(200)))
    (tmp_path / "b.json").write_text(json.dumps([{"text": "t1 t2 t3 t4"}, {"text": "t9 t8 t7"}]))
    merge_models(
        paths,
        "regmean",
        calibration=[tmp_path / "a.txt", tmp_path / "b.json"],
        out=tmp_path / "out",
        max_length=16,
        progress=False,
    )
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_examples_and_padded_examples_are_the_same_data(tmp_path):
    paths, rows = pair("llama", tmp_path), [e["input_ids"] for e in DATA[0]]
    longest = max(map(len, rows))
    padded = [
        {
            "input_ids": r + [0] * (longest - len(r)),
            "attention_mask": [1] * len(r) + [0] * (longest - len(r)),
        }
        for r in rows
    ]
    found = []
    for number, data in enumerate((DATA[0], padded)):
        out = tmp_path / f"out{number}"
        merge_models(paths, "regmean", calibration=[data, DATA[1]], out=out, progress=False)
        found.append(transformers.AutoModelForCausalLM.from_pretrained(out))
    for other in found[1:]:
        for a, b in zip(found[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_weights_in_bfloat16_are_rounded_once(tmp_path):
    paths = pair("llama", tmp_path, torch.bfloat16)
    merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    wide = [
        save(tiny("llama", k).to(torch.bfloat16), tmp_path / f"w{k}", torch.float32)
        for k in range(2)
    ]
    merge_models(wide, "regmean", calibration=DATA, out=tmp_path / "wide", progress=False)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").to(torch.bfloat16)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "weight", [np.float32(2.0), np.array(1.0), (3, 3), np.array([0.5, 0.5]), torch.ones(2)]
)
def test_weights_are_numbers_of_any_kind(weight):
    assert CalibratedMerge(method="regmean", weight=weight).shares(2) == [0.5, 0.5]


def test_a_recipe_and_the_command_line_do_as_the_function(tmp_path, capsys):
    paths = pair("llama", tmp_path, torch.bfloat16)
    files, words = [tmp_path / f"{k}.txt" for k in range(2)], [f"w{i}" for i in range(90)]
    for k, (path, file) in enumerate(zip(paths, files, strict=True)):
        save_tokenizer(path, words)
        file.write_text(" ".join(words[k::3]))
    merge_models(
        paths,
        "regmean",
        weight=[1.0, 3.0],
        reduce=0.5,
        calibration=files,
        dtype="float32",
        out=tmp_path / "a",
        progress=False,
    )
    models = f"- {{model: {paths[0]}}}\n- {{model: {paths[1]}, parameters: {{weight: 6}}}}"
    recipe = tmp_path / "r.yml"
    recipe.write_text(
        f"merge_method: regmean\nmodels:\n{models}\nparameters: {{reduce: 0.5, weight: 2}}\ndtype: "
        "float32\n"
    )
    assert (
        main(
            [
                "merge",
                str(recipe),
                str(tmp_path / "b"),
                "--no-progress",
                "--calibration",
                *map(str, files),
            ]
        )
        == 0
    )
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    for options, message in (
        ([], "'regmean' needs calibration data for each model"),
        (["--calibration", str(files[0])], "got 2 models, calibration for 1"),
    ):
        assert main(["merge", str(recipe), str(tmp_path / "c"), *options]) == 1
        assert message in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("weight: 6}", "weight: 6, density: 0.5}"))
    assert main(["merge", str(recipe), str(tmp_path / "c"), "--calibration", *map(str, files)]) == 1
    assert (
        "expected no parameter of a single model except 'weight', got 'density'"
        in capsys.readouterr().err
    )
    recipe.write_text(recipe.read_text() + "tokenizer_source: base\n")
    assert main(["merge", str(recipe), str(tmp_path / "c"), "--calibration", *map(str, files)]) == 1
    assert "with calibration does not support tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": DATA[:1]}, r"merge_models:.*2.*calibration.*1"),
        ({"calibration": None}, r"merge_models:.*calibration="),
        ({"calibration": "rows.json"}, r"merge_models:.*'rows.json'"),
        ({"calibration": DATA, "base_model": "x"}, r"merge_models:.*base_model"),
        ({"calibration": DATA, "reduce": 2.0}, r"merge_models:.*reduce.*2.0.*0.*1"),
        ({"calibration": DATA, "weight": [1.0]}, r"merge_models:.*\[1.0\].*2"),
        ({"calibration": DATA, "weight": float("nan")}, r"merge_models:.*2.*numbers"),
        ({"calibration": DATA, "reduce": "0.9"}, r"merge_models:.*'0.9'.*0.*1"),
        ({"calibration": DATA, "batch_size": "8"}, r"merge_models:.*batch_size.*'8'"),
        ({"calibration": DATA, "batch_size": 1.5}, r"merge_models:.*batch_size.*1.5"),
        ({"calibration": DATA, "weight": "half"}, r"merge_models:.*2.*numbers"),
        (
            {"calibration": DATA, "auto_class": "x"},
            r"merge_models:.*auto_class.*'x'.*AutoModel classes",
        ),
        ({"calibration": DATA, "density": 0.5}, r"merge_models:.*'density'"),
        ({"calibration": DATA, "dtype": "float23"}, "float23"),
        (
            {"calibration": DATA, "max_shard_size": "5 gigs"},
            "max_shard_size: expected .*, got '5 gigs'",
        ),
        ({"calibration": [[], DATA[1]]}, "expected one or more examples, got none"),
        ({"calibration": [[{"input_ids": []}], DATA[1]]}, "expected one or more tokens"),
        ({"calibration": [[{"input_ids": IDS}], DATA[1]]}, r"of shape \(L,\) .*got shape \[2, 9\]"),
        (
            {"calibration": [DATA[0], [{"input_ids": [10**6]}]]},
            r"token ids of 0 or more.*got 1000000",
        ),
        (
            {"calibration": [[{"input_ids": [1, -1]}], DATA[1]]},
            r"token ids of 0 or more.*got -1",
        ),
        (
            {"calibration": [{"train": ["a"]}, DATA[1]]},
            "expected rows, got a mapping with the keys train",
        ),
        (
            {"calibration": DATA, "out_dtype": "float16"},
            "merge_models: expected only arguments that regmean supports, got out_dtype",
        ),
    ],
)
def test_bad_input_is_refused(options, message, tmp_path):
    paths = pair("llama", tmp_path)
    with pytest.raises(ValueError, match=message):
        merge_models(paths, "regmean", out=tmp_path / "out", progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_settings_of_the_output_are_checked_before_the_work(tmp_path, monkeypatch):
    def work(*given, **named):
        raise AssertionError("a block was merged")

    monkeypatch.setattr(mergekit_lite.layerwise.run.BlockMerge, "begin", work)
    for options in ({"dtype": "float23"}, {"max_shard_size": "5 gigs"}, {"threads": 0}):
        with pytest.raises(ValueError, match=r"float23|5 gigs|threads"):
            merge_models(
                pair("llama", tmp_path),
                "regmean",
                calibration=DATA,
                out=tmp_path / "out",
                progress=False,
                **options,
            )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((24, 16), float("nan")), "has NaN or infinity"),
        (
            torch.ones(24, 16, dtype=torch.int32),
            "has dtype torch.int32, expected a floating-point dtype",
        ),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(value, message, tmp_path):
    paths = pair("llama", tmp_path)
    file = tmp_path / "1" / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(load_file(file) | {name: value}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"1: {name} {message}"):
        merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_models_that_differ_are_refused(tmp_path):
    paths = [
        save(tiny("llama", 0), tmp_path / "0"),
        save(tiny("llama", 1, intermediate_size=20), tmp_path / "1"),
    ]
    with pytest.raises(ValueError, match="merges with calibration need models of one architecture"):
        merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    rope = {"rope_type": "default", "rope_theta": 123.0}
    for number, changes in enumerate(
        ({"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"rope_parameters": rope})
    ):
        paths[1] = save(tiny("llama", 1, **changes), tmp_path / f"other{number}")
        with pytest.raises(ValueError, match=f"expected {next(iter(changes))} .*the same settings"):
            merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    paths[1] = save(tiny("llama", 1, attention_dropout=0.5), tmp_path / "alike")
    merge_models(paths, "regmean", calibration=DATA, out=tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"merge_models:.*'linear'"):
        merge_models(paths, "linear", calibration=DATA, out=tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("kind", "auto", "reason"),
    [
        ("albert", transformers.AutoModel, "runs a block more than once"),
        ("t5", transformers.AutoModelForTextEncoding, "pass on more than hidden states"),
    ],
)
def test_models_that_are_no_chain_of_blocks_are_refused(kind, auto, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        merge_models(
            pair(kind, tmp_path),
            "regmean",
            calibration=DATA,
            auto_class=auto,
            out=tmp_path / "out",
            progress=False,
        )
    assert not (tmp_path / "out").exists()


def test_data_that_are_refused_leave_nothing_behind(tmp_path):
    models = pair("llama", tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="expected"):
        merge_models(models, "regmean", calibration=[[], []], out=tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_experts_are_averaged_and_keep_their_names_in_the_files(tmp_path):
    """Attention is solved for; the output has the tensors of the first model's files."""
    generator = torch.Generator().manual_seed(0)
    for k in range(2):
        save(tiny("mixtral", k, vocab_size=96), tmp_path / str(k))
        save_tokenizer(tmp_path / str(k), [f"t{i}" for i in range(96)])
    ids = torch.randint(0, 96, (2, 8, 12), generator=generator).tolist()
    data = [[{"input_ids": row} for row in rows] for rows in ids]
    models = [tmp_path / "0", tmp_path / "1"]
    merge_models(models, "regmean", calibration=data, out=tmp_path / "out", progress=False)
    first, second, merged = (
        load_file(tmp_path / name / "model.safetensors") for name in ("0", "1", "out")
    )
    assert merged.keys() == first.keys()
    for name, value in merged.items():
        is_average = torch.allclose(value, (first[name] + second[name]) / 2, atol=1e-6)
        solved = "self_attn" in name or "lm_head" in name
        assert is_average != solved, name
