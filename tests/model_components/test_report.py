"""Every report prints as a table, shows itself in a notebook, becomes JSON, and says what a plot
needs."""

import json
import pickle
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from heads.lora import accelerate_lora_, lora_report, merge_lora
from heads.pairwise import calibrate_, freeze_, pairwise_report
from kronecker import KroneckerConfig, PruneConfig, compare, convert_, prune_
from mergekit_lite import load_recipe, make_plan, merge_models
from mergekit_lite.masks import Merger
from model_components._report import Report, Table, bars, needs_matplotlib, plain
from tests.heads.pairwise.support import model_of, pairs_of
from tests.support.models import save, tiny
from thinker.report import Accuracy, Grid

IDS = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(0))


def merging(tmp_path):
    for seed in range(2):
        save(tiny("llama", seed), tmp_path / str(seed))
    (tmp_path / "r.yml").write_text(
        json.dumps(
            {
                "models": [{"model": str(tmp_path / k)} for k in "01"],
                "merge_method": "linear",
                "parameters": {"weight": 1},
            }
        )
    )
    yield make_plan(load_recipe(tmp_path / "r.yml"))
    yield merge_models(
        [tmp_path / "0", tmp_path / "1"], weight=0.5, out=tmp_path / "out", progress=False
    )
    yield Merger([tiny("llama", 0), tiny("llama", 1)], labels=["a", "b"]).report()


def compressing(tmp_path):
    model = tiny("gpt2")
    yield prune_(tiny("gpt2"), PruneConfig(keep=0.5), calibration=[IDS], progress=False)
    yield convert_(model, KroneckerConfig(b_shape=(2, 1), init="van_loan"), progress=False)
    yield compare({"small": model}, [IDS], runs=1, new=2)


def adapting(tmp_path):
    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj", "k_proj"]))
    yield accelerate_lora_(model)
    yield lora_report(model)
    yield merge_lora(model, tmp_path / "merged", progress=False)


def judging(tmp_path):
    model = model_of()
    data = model.dataset(pairs_of(20), progress=False)
    report = pairwise_report(model, data, progress=False)
    yield from (
        report,
        report.metrics,
        report.cut,
        report.packing,
        calibrate_(model, data, progress=False),
    )
    yield freeze_(model, "all")


def thinking(tmp_path):
    yield Accuracy(0.5, 0.25)
    yield Grid(
        (2, 4),
        (1, 2),
        ((Accuracy(0.5, 0.2), Accuracy(0.6, 0.3)), (Accuracy(0.7, 0.4), Accuracy(0.8, 0.5))),
    )


@pytest.mark.parametrize("source", [merging, compressing, adapting, judging, thinking])
def test_every_report(source, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = 0
    for report in source(tmp_path):
        assert isinstance(report, Report)
        text, page = str(report), report._repr_html_()
        assert text.strip()
        assert all(re.sub(r"\s", "", line) for line in text.splitlines())
        for cell in re.findall(r"<td>(.*?)</td>", page):
            assert "<" not in cell
        assert page.count("<table>") == (report.table() is not None and bool(report.table().rows))
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))
        if hasattr(report, "plot"):
            drawn += 1
            figure = report.plot()
            assert isinstance(figure, Figure)
            assert figure.axes
            axes = Figure().add_subplot()
            assert report.plot(axes) is axes.figure
            assert report.plot(ax=axes).axes
            with monkeypatch.context() as patched:
                patched.setitem(sys.modules, "matplotlib", None)
                with pytest.raises(
                    ImportError,
                    match=r"plot needs matplotlib; pip install 'model-components\[plot\]'",
                ):
                    report.plot()
    assert drawn


def test_text_is_aligned_and_escaped():
    table = Table(("name", "n"), [("<b>", "1"), ("long name", "1,000")])
    assert str(table) == "name           n\n<b>            1\nlong name  1,000"
    assert "&lt;b&gt;" in table._repr_html_()
    told = Table(("what", "why"), [("a", "because"), ("bc", "so")], sentences=True)
    assert str(told) == "what  why\na     because\nbc    so"
    given = {
        1: torch.tensor([1.5]),
        "d": torch.bfloat16,
        "n": float("nan"),
        "i": float("inf"),
        "p": Path("torch.x"),
    }
    assert plain(given) == {"1": [1.5], "d": "bfloat16", "n": None, "i": None, "p": "torch.x"}


@dataclass(frozen=True)
class Risky(Report):
    text: str

    def summary(self):
        return [self.text]

    def remarks(self):
        return [self.text]


def test_lines_are_escaped():
    assert Risky("<b>")._repr_html_() == "<p>&lt;b&gt;</p><p>&lt;b&gt;</p>"
    assert str(Risky("<b>")) == "<b>\n<b>"


def test_bars_begin_at_the_top():
    low, high = bars(None, "test", {"first": 1.0, "second": 2.0}, "size").axes[0].get_ylim()
    assert low > high


def test_a_figure_shows_itself_in_a_notebook():
    figure = bars(None, "x", {"first": 1.0}, "share")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pickle.loads(pickle.dumps(figure)).axes


def test_what_a_plot_needs_is_said_before(monkeypatch):
    needs_matplotlib("demo")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"demo:.*matplotlib"):
        needs_matplotlib("demo")


def test_a_merge_says_what_was_resumed_and_what_the_plan_noted(tmp_path):
    (_, report, _) = merging(tmp_path)
    report = replace(
        report, resumed=["model.safetensors"], notes=["t: a filter is in no tensor's name"]
    )
    assert str(report).splitlines()[2:] == [
        "1 of 1 files were kept from an interrupted run",
        "note: t: a filter is in no tensor's name",
    ]
