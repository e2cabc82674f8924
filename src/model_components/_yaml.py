"""Load YAML from users; reject repeated keys and aliases that expand to huge documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

_MOST_VALUES = 100_000
"""The most values that a document may have with aliases expanded; ten lines can give billions."""


class Loader(yaml.SafeLoader):
    """A safe loader that rejects repeated keys, and aliases that expand to huge documents."""

    def compose_document(self) -> yaml.Node | None:
        """Return a document's node after checking its size."""
        node = super().compose_document()
        if node is not None and _count(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(
                f"expected at most {_MOST_VALUES:,} values with aliases expanded, got more"
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping's node; raise an error for keys that repeat or are not scalars.

        The check is here because PyYAML later adds the keys of ``<<: *other`` to the mapping.
        """
        node = super().compose_mapping_node(anchor)
        earlier: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"expected a single value as a key, got several (line {line})")
            # << may occur twice, to merge two mappings
            if key.value in earlier and key.value != "<<":
                raise yaml.YAMLError(f"{key.value!r} is repeated in one mapping (line {line})")
            earlier.add(key.value)
        return node


def read_yaml(text: str, loader: type[Loader] = Loader) -> list[Any]:
    r"""Return the documents of a YAML text, without empty ones.

    Args:
        text: The text.
        loader: The class that reads it.

    Raises:
        ValueError: The text is not YAML, or a document is nested too deeply or too large.

    >>> read_yaml("a: 1")
    [{'a': 1}]
    >>> read_yaml("a: 1\na: 2")
    Traceback (most recent call last):
    ValueError: 'a' is repeated in one mapping (line 2)
    """
    try:
        documents = list(yaml.load_all(text, loader))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    # for invalid values of tags such as !!timestamp, PyYAML raises errors of any class
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    return [document for document in documents if document is not None]


def read_mapping(text: str, loader: type[Loader] = Loader) -> Mapping[Any, Any]:
    """Return the only document of a YAML text, a mapping; empty text gives an empty mapping.

    Args:
        text: The text.
        loader: The class that reads it.

    Raises:
        ValueError: `read_yaml` raises an error, the text has several documents, or the document is
            not a mapping.
    """
    documents = read_yaml(text, loader) or [{}]
    if len(documents) > 1 or not isinstance(documents[0], Mapping):
        kinds = " and ".join(type(document).__name__ for document in documents)
        raise ValueError(f"expected a mapping, got {kinds}")
    return documents[0]


def _count(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return the number of values in a node; infinity if the node contains itself."""
    if node not in known:
        known[node] = float("inf")  # the final value if the node contains itself
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [one for pair in node.value for one in pair]
        known[node] = 1 + sum(_count(one, known) for one in inner)
    return known[node]
