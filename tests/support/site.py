"""What the documentation site has beside the pages of docs/: rows of benchmarks, the changelog, how to contribute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for name, held in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / held).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "tests" / "benchmarks" / "results").glob("*.csv")):
        files.append(File.generated(config, f"measured/{path.name}", abs_src_path=str(path)))
    return files
