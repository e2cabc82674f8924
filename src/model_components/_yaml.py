"""Read YAML that users wrote: a key stands once in a mapping, and aliases do not multiply."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_VALUES = 100_000
"""Values of a document once aliases are followed; ten lines of aliases can stand for billions."""


class Loader(yaml.SafeLoader):
    """A safe loader that refuses keys that stand twice and documents that aliases make huge."""

    def compose_document(self) -> yaml.Node | None:
        """Return a document's node, checked for its size."""
        node = super().compose_document()
        if node is not None and _count(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Return a mapping whose keys are single values that differ."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, (list, dict)):
                raise yaml.YAMLError(f"a mapping has {key!r} as a key (line {line})")
            if key in seen:
                raise yaml.YAMLError(f"{key!r} stands twice in one mapping (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, loader: type[Loader] = Loader) -> list[Any]:
    r"""Return the documents of a text that are not empty.

    Raises:
        ValueError: It is not YAML, or a document is nested too deep or too large.

    >>> read_yaml("a: 1")
    [{'a': 1}]
    >>> read_yaml("a: 1\na: 2")
    Traceback (most recent call last):
    ValueError: 'a' stands twice in one mapping (line 2)
    """
    try:
        documents = list(yaml.load_all(text, loader))
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ValueError(" ".join(str(error).split())) from error
    return [document for document in documents if document is not None]


def _count(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return the number of values in a node; infinite where it holds itself."""
    if node not in known:
        known[node] = float("inf")  # until it is counted
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        known[node] = 1 + sum(_count(part, known) for part in inner)
    return known[node]
