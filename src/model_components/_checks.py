"""Configs whose fields are declared once, with type and range, and checked on creation.

>>> from typing import Annotated
>>> @dataclass(frozen=True, kw_only=True)
... class Sizes(CheckedConfig):
...     rank: Annotated[int, Range(least=1)] = 1
>>> Sizes(rank=0)
Traceback (most recent call last):
ValueError: Sizes: rank is 0, expected a whole number, 1 or more
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from types import GenericAlias, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    TypedDict,
    Union,
    get_args,
    get_origin,
)

_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
}
_PLURALS = {int: "whole numbers", float: "finite numbers", str: "texts"}


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range of a number, given in the type of a field: ``Annotated[int, Range(least=1)]``.

    ``least`` and ``most`` are inclusive; ``above`` and ``below`` are exclusive. The range applies
    to each item of a tuple, and not to text or None. Infinity and NaN are outside every range.

    >>> str(Range(above=0, most=1)), str(Range(least=1))
    ('above 0 and at most 1', '1 or more')
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __call__(self, value: object) -> None:
        """Raise a ValueError if a number, or an item of a tuple or list, is outside the range."""
        items = value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if isinstance(item, int | float) and not self._holds(item):
                raise ValueError(str(self))

    def _holds(self, number: float) -> bool:
        # `isfinite` raises an error for whole numbers beyond the range of floats
        return (
            (isinstance(number, int) or math.isfinite(number))
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        """Return the range in words."""
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        words = []
        if self.least is not None:
            words.append(f"{self.least:g} or more")
        if self.above is not None:
            words.append(f"above {self.above:g}")
        if self.most is not None:
            words.append(f"at most {self.most:g}")
        if self.below is not None:
            words.append(f"below {self.below:g}")
        return " and ".join(words)


# the range of types that declare none: every field rejects NaN and infinity
_FINITE = Range()
Whole = Annotated[int, Range(least=1)]
"""The type of a field that holds a whole number, 1 or more."""

MaybeWhole = Annotated[int | None, Range(least=1)]
"""The type of a field that holds a whole number, 1 or more, or None."""


class CheckedConfig:
    """The base class of configs, which check their fields and convert to and from JSON.

    Subclasses are frozen dataclasses.
    """

    def __post_init__(self) -> None:
        """Check every field, and then combinations of fields."""
        for field in fields(self):  # pyrefly: ignore[bad-argument-type]: subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, list):  # JSON has no tuples
                object.__setattr__(self, field.name, tuple(value))
        check_config(self, CheckedConfig)

    def problems(self) -> Iterable[str]:
        """Return messages about valid fields that conflict; subclasses override this method."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, with lists instead of tuples."""
        # pyrefly: ignore[bad-argument-type]: its subclasses are dataclasses
        values = asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a config from the result of `to_dict`.

        Raises:
            ValueError: A name is unknown, or a value is invalid.
        """
        refuse_unknown(cls.__name__, values, declared_fields(cls, CheckedConfig))
        return cls(**values)

    def to_json(self) -> str:
        """Return the config as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make a config from the result of `to_json`."""
        return cls.from_dict(json.loads(text))


def check_config(config: Any, base: type) -> None:
    """Check each field of a config and, if all are valid, the conflicts that ``problems()`` finds.

    Args:
        config: The config.
        base: A base class of the config. Its own and inherited fields are not checked.

    Raises:
        ValueError: A field is invalid, or fields conflict. The message lists all such problems.
    """
    hints = declared_fields(type(config), base)
    problems = [
        problem(config, name, _describe(hint))
        for name, hint in hints.items()
        if not _fits(getattr(config, name), hint)
    ]
    # `problems` may compute with fields, so each field must be valid first
    problems = problems or list(config.problems())
    if problems:
        raise ValueError(f"{type(config).__name__}: {'; '.join(problems)}")


def problem(config: object, name: str, expected: str) -> str:
    """Return the message about an invalid field."""
    return f"{name} is {getattr(config, name)!r}, expected {expected}"


def refuse(owner: str, name: str, value: object, expected: str) -> NoReturn:
    """Raise a ValueError about an invalid value.

    >>> refuse("merge", "rank", 0, "1 or more")
    Traceback (most recent call last):
    ValueError: merge: rank is 0, expected 1 or more
    """
    raise ValueError(f"{owner}: {name} is {value!r}, expected {expected}")


def check_choice(owner: str, name: str, value: object, choices: Collection[object]) -> None:
    """Check that a value is one of several choices; torch.compile can trace this function."""
    if value not in choices:
        refuse(owner, name, value, f"one of {', '.join(map(str, choices))}")


def check_value(owner: str, name: str, value: object, kind: Any) -> None:
    """Check a value's type and range.

    Args:
        owner: The name of the function or class whose argument is checked.
        name: The name of the argument.
        value: The value of the argument.
        kind: The expected type, such as ``Annotated[int, Range(least=1)]``.

    Raises:
        ValueError: The value has another type, or is outside the range.
    """
    if not _fits(value, kind):
        refuse(owner, name, value, _describe(kind))


def refuse_unknown(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ValueError if a name is unknown, and suggest the closest name or list all names."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            if near:
                advice = f"did you mean {near[0]}?"
            else:
                advice = f"expected one of {', '.join(known)}"
            raise ValueError(f"{owner}: unknown field {name}; {advice}")


def is_whole(value: object, least: float = -math.inf) -> bool:
    """Return whether a value is a whole number of at least ``least``; booleans do not count."""
    # numpy's integers are Integral, too
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


@functools.cache
def declared_fields(cls: type, base: type) -> dict[str, Any]:
    """Return the type of each field of a class, except fields of ``base`` and its base classes."""
    found: dict[str, Any] = {}
    above = cls.__mro__[: cls.__mro__.index(base)]
    # if a subclass declares a field again, the subclass's type is used
    for one in reversed(above):
        # in modules that postpone annotations, types are strings
        found |= inspect.get_annotations(one, eval_str=True)
    return {name: hint for name, hint in found.items() if get_origin(hint) is not ClassVar}


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value matches a type hint and its range."""
    if _is_plain(value, hint):
        return True
    # imported here, so that importing a layer loads no more than torch
    from huggingface_hub.dataclasses import validate_typed_dict
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    try:
        validate_typed_dict(_schema(hint), {"value": value})
    except StrictDataclassFieldValidationError:
        return False
    return True


def _is_plain(value: object, hint: Any) -> bool:
    """Return whether a type hint names the exact class of a value, and the value is in the range.

    This decides most cases without importing huggingface_hub.
    """
    plain, limit = get_args(hint) if get_origin(hint) is Annotated else (hint, _FINITE)
    classes = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
    # the exact class, because True is an int, too
    if type(value) not in classes:
        return False
    try:
        limit(value)
    except ValueError:
        return False
    return True


@functools.cache
def _schema(hint: Any) -> Any:
    """Return a TypedDict with one field of the type that a hint names.

    huggingface_hub can check the fields of a TypedDict, but not a value against a bare type.

    The ``strict`` decorator of huggingface_hub checks neither frozen dataclasses nor annotations
    that are strings.
    """
    if get_origin(hint) is Annotated:
        plain, limit = get_args(hint)
    else:
        plain, limit = hint, _FINITE
    # pyrefly: ignore[not-callable, invalid-annotation]: a type that is created at run time
    return TypedDict("Value", {"value": Annotated[_with_whole_numbers(plain), limit]})


def _with_whole_numbers(hint: Any) -> Any:
    """Return a type hint that accepts an int where a float is expected, as type checkers do."""
    if hint is float:
        return int | float
    if get_origin(hint) in (Union, UnionType):
        return functools.reduce(operator.or_, map(_with_whole_numbers, get_args(hint)))
    if get_origin(hint) is tuple:
        return GenericAlias(tuple, tuple(map(_with_whole_numbers, get_args(hint))))
    return hint


def _describe(hint: Any) -> str:
    """Return a description of the values that a type hint allows.

    >>> _describe(Annotated[tuple[int, int] | None, Range(least=1)])
    'a tuple of 2 whole numbers, 1 or more, or None'
    """
    limit = ""
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = " or ".join(_describe_kind(kind) for kind in kinds if kind is not NoneType)
    if limit:
        words += f", {limit}"
    if NoneType in kinds:
        words += ", or None"
    return words


def _describe_kind(hint: Any) -> str:
    """Return a description of the values that a type hint allows; unions are not supported."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin not in (tuple, list):
        return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))
    if get_origin(args[0]) is Literal:
        items = f"names, each {_describe_kind(args[0])}"
    else:
        items = _PLURALS.get(args[0], args[0].__name__)
    if origin is tuple and args[-1] is not Ellipsis:
        items = f"{len(args)} {items}"
    return f"a {origin.__name__} of {items}"
