"""Recipes mean what they mean in mergekit: against what it wrote (golden.json), and, marked
`peers`, against it now."""

import json
from pathlib import Path

import numpy as np
import pytest

from . import dialect
from .models import build

GUIDE = Path(__file__).parents[3] / "docs" / "merging.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    build(root)
    return root


@pytest.fixture(scope="module")
def ours(models):
    return dict(dialect.outcomes(dialect.ours, models))


def verdicts(ours, theirs):
    found = {name: dialect.verdict(name, ours[name], theirs[name]) for name in dialect.RECIPES}
    assert not [v for v in found.values() if v not in dialect.ROWS]
    return found


def test_every_recipe_comes_out_as_mergekit_recorded_it_or_as_the_lists_say(ours):
    found = verdicts(ours, json.loads(dialect.GOLDEN.read_text()))
    table = dialect.table(found)
    assert table in GUIDE.read_text(), f"the guide's table should be\n\n{table}\n"


def test_the_lists_name_recipes_that_are_there_once():
    listed = [
        n
        for groups in (dialect.DIFFERENT, dialect.REFUSED, dialect.EXTRA)
        for g in groups.values()
        for n in g.split()
    ]
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) <= dialect.RECIPES.keys()


def test_a_planted_difference_is_seen(models, tmp_path):
    recipe = dialect.RECIPES["linear_weights"]
    outcomes = []
    for number, weight in enumerate(("0.3", "0.3003")):
        text = recipe.replace("weight: 0.3}", f"weight: {weight}" + "}")
        with dialect.chdir(models):
            dialect.ours(text, tmp_path / str(number))
        outcomes.append(dialect.signature(tmp_path / str(number)))
    assert dialect.same(outcomes[0], outcomes[0])
    assert not dialect.same(*outcomes)


@pytest.mark.peers
def test_mergekit_still_does_what_was_recorded(models):
    pytest.importorskip("mergekit", reason="mergekit is in the bench extra")
    our_tensors, their_tensors = {}, {}
    theirs = dict(dialect.outcomes(dialect.mergekits, models, their_tensors))
    ours = dict(dialect.outcomes(dialect.ours, models, our_tensors))
    golden = json.loads(dialect.GOLDEN.read_text())
    for name, outcome in theirs.items():
        recorded = golden[name]
        if not name.startswith("r_"):
            assert ("refused" in outcome) == ("refused" in recorded), name
            assert "refused" in outcome or dialect.same(outcome, recorded, name), name
    for name, verdict in verdicts(ours, theirs).items():
        # element by element, which the recorded projections are not
        if verdict.startswith("equal"):
            left, right = our_tensors[name], their_tensors[name]
            assert left.keys() == right.keys(), name
            for key in left:
                np.testing.assert_allclose(
                    left[key], right[key], rtol=0, atol=2e-6, err_msg=f"{name}: {key}"
                )
