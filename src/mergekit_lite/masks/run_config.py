"""`MaskRun`: a whole run, read from a YAML file and checked before anything starts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Self

from transformers import TrainingArguments

from model_components._checks import Range, check_choice, check_value, refuse_unknown
from model_components._yaml import read_mapping

from .config import KLConfig, MaskConfig

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """One task's data.

    Args:
        files: Of `TextExamples`, one or several.
        name: What to call it; default the first file's.
        component: The component that it follows; default: in the order of the list.
    """

    files: tuple[str, ...]
    name: str
    component: int


@dataclass(frozen=True, kw_only=True)
class MaskRun:
    """Settings of `run_masks`.

    Args:
        components: What `Merger.from_pretrained` takes.
        data: Each task's.
        base: What the components were tuned from: masks lie over differences from it; methods of
            ``compare`` may need it, too.
        masks: Fields of `MaskConfig`.
        kl: Fields of `KLConfig`.
        training: Fields of `TrainingArguments`; by default 300 steps of 8 examples at a rate of
            3e-2.
        compare: Methods of `merge_models` that the table compares with; default: see `methods`.
        held_out: The share of each task's examples that is kept for the table, or how many of them.
        max_length: Tokens of an example.
        train_on_inputs: Supervise what is asked, too.
        dtype: Of all components.
        seed: Of the split and the training.

    Raises:
        ValueError: An unknown field, or a bad value.
    """

    components: tuple[str, ...]
    data: tuple[TaskData, ...]
    base: str | None = None
    masks: MaskConfig = field(default_factory=MaskConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    training: Mapping[str, object] = field(default_factory=dict)
    compare: tuple[str, ...] | None = None
    held_out: float = 0.1
    max_length: int = 512
    train_on_inputs: bool = False
    dtype: str = "auto"
    seed: int = 0

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a file; models and data in it are named as from where the command runs.

        Raises:
            ValueError: It is no YAML mapping, or as of the class.
        """
        if not Path(path).is_file():
            raise ValueError(f"MaskRun: expected a YAML file of settings, but there is no {path}")
        try:
            values = read_mapping(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path}: expected a YAML mapping of components, data, masks, ...: {error}"
            ) from error
        _known(str(path), values, [f.name for f in fields(cls)], needed=("components", "data"))
        settings = dict(values)
        for name, kind in (("masks", MaskConfig), ("kl", KLConfig)):
            settings[name] = _built(f"{path}: {name}", kind, _numbers(settings.get(name, {}), kind))
        if not isinstance(settings.get("training", {}), Mapping):
            raise ValueError(
                f"{path}: training is {settings['training']!r}, expected fields of "
                "TrainingArguments"
            )
        settings["training"] = _numbers(settings.get("training", {}), TrainingArguments)
        for name in ("components", "data", "compare"):
            if name in settings and not isinstance(settings[name], list):
                raise ValueError(f"{path}: {name} is {settings[name]!r}, expected a list")
            if name in settings:
                settings[name] = tuple(settings[name])
        settings["data"] = tuple(
            _task(f"{path}: data", i, entry) for i, entry in enumerate(settings["data"])
        )
        return cls(**settings)

    @property
    def methods(self) -> tuple[str, ...]:
        """``compare``.

        By default linear, regmean (if all components have data), and over a base task_arithmetic.
        """
        if self.compare is not None:
            return self.compare
        followed = len({data.component for data in self.data}) == len(self.components)
        if len(self.components) > 1:
            several = ("linear", *(("regmean",) if followed else ()))
        else:
            several = ()
        if self.base is None:
            return several
        return (*several, "task_arithmetic")

    def __post_init__(self) -> None:
        _known("MaskRun: training", self.training, [f.name for f in fields(TrainingArguments)])
        self._check_models()
        self._check_tasks()
        self._check_numbers()

    def _check_models(self) -> None:
        outside = [d for d in self.data if not 0 <= d.component < len(self.components)]
        if self.base is not None and not isinstance(self.base, str):
            raise ValueError(f"MaskRun: base is {self.base!r}, expected the name of a model")
        if len(self.components) < (2 if self.base is None else 1) or not self.data or outside:
            if outside:
                wrong = f"; {outside[0].name} follows component {outside[0].component}"
            else:
                wrong = ""
            raise ValueError(
                f"MaskRun: {len(self.components)} components and {len(self.data)} tasks{wrong}; "
                "expected two components or more (one over a base), and data that follow them"
            )
        for name, values in (("components", self.components), ("compare", self.methods)):
            if odd := [value for value in values if not isinstance(value, str)]:
                raise ValueError(
                    f"MaskRun: {name} has {odd[0]!r}; expected names, without parameters"
                )

    def _check_tasks(self) -> None:
        names = [task.name for task in self.data]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"MaskRun: two tasks are called {twice[0]!r}; expected names that differ"
            )

    def _check_numbers(self) -> None:
        for name, kind in (
            ("max_length", Annotated[int, Range(least=2)]),
            ("seed", Annotated[int, Range(least=0)]),
            ("train_on_inputs", bool),
            ("held_out", Annotated[float, Range(above=0)]),
        ):
            check_value("MaskRun", name, getattr(self, name), kind)
        check_choice("MaskRun", "dtype", self.dtype, _DTYPES)


def _known(
    where: str, values: Mapping[str, object], known: Sequence[str], needed: Sequence[str] = ()
) -> None:
    refuse_unknown(where, map(str, values), known)
    if lost := [name for name in needed if name not in values]:
        raise ValueError(f"{where}: has no {lost[0]}")


def _numbers(values: object, kind: Any) -> Any:
    """Return numbers that YAML reads as text, as 1e-2, as numbers.

    They are so only where the field of ``kind`` is one.
    """
    if not isinstance(values, Mapping):
        return values
    numbers = dict(values)
    usual = {field.name: field.default for field in fields(kind)}
    for name, value in values.items():
        default = usual.get(name)
        if (
            isinstance(value, str)
            and isinstance(default, int | float)
            and not isinstance(default, bool)
        ):
            with contextlib.suppress(ValueError):
                number = float(value)
                numbers[name] = (
                    int(number) if isinstance(default, int) and number.is_integer() else number
                )
    return numbers


def _built(where: str, kind: Any, values: object) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}, expected fields of {kind.__name__}")
    _known(where, values, [f.name for f in fields(kind)])
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _task(where: str, index: int, entry: object) -> TaskData:
    entry = {"files": entry} if isinstance(entry, (str, list)) else entry
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"{where}: entry {index} is {entry!r}, expected a file, a list of files, or files and "
            "name"
        )
    _known(where, entry, [f.name for f in fields(TaskData)], needed=("files",))
    files = entry["files"]
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not files or not all(isinstance(f, str) for f in files):
        raise ValueError(f"{where}: files of entry {index} are {files!r}, expected names of files")
    component: object = entry.get("component", index)
    if not isinstance(component, int) or isinstance(component, bool):
        raise ValueError(
            f"{where}: component of entry {index} is {component!r}, expected the index of one"
        )
    return TaskData(
        files=tuple(files), name=str(entry.get("name", Path(files[0]).stem)), component=component
    )
