"""Configs check what is declared, whatever way a value arrives."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

import pytest

from heads.pairwise import PairwiseConfig
from kronecker import DistillConfig, KroneckerConfig, LowRankConfig, PruneConfig
from mergekit_lite.masks import KLConfig, MaskConfig
from model_components._checks import CheckedConfig, Range, Whole, check_value, problem
from thinker import ExitRule, ThinkerConfig


@dataclass(frozen=True, kw_only=True)
class Settings(CheckedConfig):
    """One field of each kind."""

    kind_of: ClassVar[str] = "none"
    rank: Whole = 1
    share: Annotated[float | None, Range(above=0, below=1)] = None
    init: Literal["even", "odd"] | tuple[int, int] = "even"
    names: tuple[str, ...] = ()
    shape: Annotated[tuple[int, int] | None, Range(least=1)] = None
    trained: bool = False
    weight: float = 1.0

    def problems(self) -> Iterator[str]:
        """Yield a problem if there is a shape with rank 7."""
        if self.rank == 7 and self.shape is not None:
            yield problem(self, "shape", "None with rank 7")


class Sub(Settings):
    """A subclass that declares nothing."""


@pytest.mark.parametrize("cls", [Settings, Sub])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rank", 0, "a whole number, 1 or more"),
        ("rank", True, "a whole number, 1 or more"),
        ("rank", 1.0, "a whole number, 1 or more"),
        ("rank", "1", "a whole number, 1 or more"),
        ("rank", None, "a whole number, 1 or more"),
        ("share", 1, "a finite number, above 0 and below 1, or None"),
        ("share", 0.0, "a finite number, above 0 and below 1, or None"),
        ("share", float("nan"), "a finite number, above 0 and below 1, or None"),
        ("init", "none", "one of even, odd or a tuple of 2 whole numbers"),
        ("init", (1,), "one of even, odd or a tuple of 2 whole numbers"),
        ("names", "abc", "a tuple of texts"),
        ("names", ("a", 1), "a tuple of texts"),
        ("shape", (0, 1), "a tuple of 2 whole numbers, 1 or more, or None"),
        ("shape", (1, 1, 1), "a tuple of 2 whole numbers, 1 or more, or None"),
        ("trained", 1, "True or False"),
        ("weight", True, "a finite number"),
        ("weight", float("inf"), "a finite number"),
    ],
)
def test_a_field_is_refused_with_what_is_expected(cls, name, value, expected):
    message = f"{cls.__name__}: {name} is {value!r}, expected {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cls(**{name: value})


def test_all_problems_are_listed_and_those_of_pairs_come_after_single_fields():
    with pytest.raises(ValueError, match=r"rank is 0.*; trained is 'no'"):
        Settings(rank=0, trained="no")
    with pytest.raises(ValueError, match=r"shape is \(1, 1\), expected None with rank 7"):
        Settings(rank=7, shape=(1, 1))


def test_whole_numbers_are_numbers_and_lists_become_tuples():
    settings = Settings(weight=10**400, share=0.5, shape=[2, 3], init=[0, 1])
    assert settings.shape == (2, 3)
    assert settings.init == (0, 1)
    assert Settings.from_json(settings.to_json()) == settings


def test_unknown_names_are_refused_with_the_one_that_is_meant():
    with pytest.raises(ValueError, match=r"Settings: unknown field rnk; did you mean rank\?"):
        Settings.from_dict({"rnk": 1})
    with pytest.raises(ValueError, match=r"Settings: unknown field zzz; expected one of rank,"):
        Settings.from_dict({"zzz": 1})


@pytest.mark.parametrize(
    "config",
    [
        KroneckerConfig(b_shape=(2, 1), keep=(0, 1)),
        LowRankConfig(rank=8),
        PruneConfig(keep=0.3, multiple_of=8),
        DistillConfig(labels=0.5),
        MaskConfig(modules=("a", "b"), initial=0.5),
        KLConfig(coefficients="fixed", shares=(1.0, 3.0)),
        ExitRule(min_steps=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_config_checks_all_fields_and_round_trips(config):
    assert type(config).from_json(config.to_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    for field in fields(config):
        with pytest.raises(ValueError, match=f"^{type(config).__name__}: {field.name} is "):
            type(config)(**{**vars(config), field.name: object()})


@pytest.mark.parametrize("cls", [ThinkerConfig, PairwiseConfig])
def test_model_configs_save_all_fields_and_refuse_newer_formats(cls, tmp_path):
    cls().save_pretrained(tmp_path)
    assert cls.from_pretrained(tmp_path).to_dict() == cls.from_dict(cls().to_dict()).to_dict()
    saved = cls().to_dict()
    assert saved["format_version"] == 1
    # a field that equals its default is saved too: a later default must not change it
    assert saved.keys() >= set(cls.__annotations__)
    with pytest.raises(ValueError, match="expected format 1, got 2"):
        cls.from_dict({**saved, "format_version": 2})
    assert (
        cls.from_dict({**saved, "note": "of a trainer"}).to_dict() == cls.from_dict(saved).to_dict()
    )
    with pytest.raises(ValueError, match=f"^{cls.__name__}: unknown field note"):
        cls(note="mine")


@pytest.mark.parametrize("cls", [ThinkerConfig, PairwiseConfig])
def test_fields_that_transformers_takes_are_kept(cls):
    others = {"quantization_config": {"bits": 4}, "auto_map": {"AutoModel": "a.B"}}
    for config in (cls(pad_token_id=0, **others), cls.from_dict(cls().to_dict() | others)):
        assert config.quantization_config == {"bits": 4}
        assert config.to_dict()["auto_map"] == {"AutoModel": "a.B"}
    assert cls(attn_implementation="eager")._attn_implementation == "eager"


def test_a_value_outside_a_config_is_checked_by_the_same_rules():
    check_value("merge", "rank", 3, Whole)
    with pytest.raises(ValueError, match="merge: rank is 0, expected a whole number, 1 or more"):
        check_value("merge", "rank", 0, Whole)
