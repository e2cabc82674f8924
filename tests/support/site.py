"""What the documentation site has beside the pages of docs/: reference, notebooks, rows, changelog,
contributing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.support.reference import PAGES, text  # noqa: E402

ELSEWHERE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
COLAB = "https://colab.research.google.com"


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for name, held in ELSEWHERE.items():
        files.append(
            File.generated(config, name, content=(ROOT / held).read_text(encoding="utf-8"))
        )
    for page in PAGES:
        files.append(File.generated(config, f"reference/{page.guide}.md", content=text(page)))
    for path in sorted((ROOT / "tests" / "benchmarks" / "results").glob("*.csv")):
        files.append(File.generated(config, f"measured/{path.name}", abs_src_path=str(path)))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(
            File(
                f"notebooks/{path.name}",
                str(ROOT),
                config["site_dir"],
                config["use_directory_urls"],
            )
        )
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A notebook's links to guides, which lie elsewhere here, and a badge that opens it where the
    code is public."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = re.sub(r'href="\.\./docs/(\w+)\.md"', r'href="../../\1/"', html)
    html = re.sub(r'href="(\w+)\.ipynb"', r'href="../\1/"', html)
    repository = (config["repo_url"] or "").removesuffix("/")
    if "github.com/" not in repository:
        return html
    place = repository.split("github.com/")[1]
    link = f"{COLAB}/github/{place}/blob/main/notebooks/{Path(page.file.src_uri).name}"
    return (
        f'<p><a href="{link}"><img alt="Open in Colab" '
        f'src="{COLAB}/assets/colab-badge.svg"></a></p>{html}'
    )
