"""Runs the notebooks as a reader would, and keeps what they print and draw (`make notebooks`)."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("modules", "merging", "masks", "kronecker", "thinker", "lora", "pairwise")


def cells(name: str) -> list[str]:
    """The code of a notebook, but for the lines that install."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [re.sub(r"^( *)%pip .*", r"\1raise ImportError", text, flags=re.M) for text in code]


def kept(outputs: Sequence[Any]) -> list[Any]:
    """What a reader wants to see of a cell's outputs: no progress and warnings, and no folder of
    this machine."""
    found = []
    for output in outputs:
        if output["output_type"] == "stream":
            if output["name"] == "stderr":
                continue
            output["text"] = re.sub(r"/\S*/tmp\w+", "/tmp/example", output["text"])
            if found and found[-1]["output_type"] == "stream":
                found[-1]["text"] += output["text"]
                continue
        found.append(output)
    return found


def run(name: str) -> None:
    """Run one, in a folder of its own, and write it."""
    import nbformat
    from nbclient import NotebookClient

    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=3000, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NAMES:
        print(chosen, flush=True)
        run(chosen)
