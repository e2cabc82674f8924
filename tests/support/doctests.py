"""Show the examples of docstrings as code on the site: in Markdown, ``>>>`` would be quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

# from a prompt to the next empty line
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Return a docstring with its examples in fences."""
    return _EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Examples(griffe.Extension):
    """Put the examples of each docstring in fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object after it was collected."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
