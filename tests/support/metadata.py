"""Let Python find the library's entry points in a checkout that is not installed: ``python -m
tests.support.metadata FOLDER``, for a folder on PYTHONPATH."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path


def main(folder: str) -> None:
    """Write what pip would write, unless it has."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        importlib.metadata.version(project["name"])
        return
    except importlib.metadata.PackageNotFoundError:
        place = Path(folder) / "model_components-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
