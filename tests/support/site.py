"""What the documentation site has beside the pages of docs/: reference, notebooks, examples, rows,
changelog, contributing."""

from __future__ import annotations

import ast
import posixpath
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
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*") if p.suffix in (".py", ".yml", ".yaml"))


def page_of(example: Path) -> str:
    """The page of an example's code."""
    return f"{example.relative_to(ROOT).as_posix()}.md"


def code_of(example: Path) -> str:
    """An example's page: its code, to be copied."""
    name = example.relative_to(ROOT).as_posix()
    kind = "python" if example.suffix == ".py" else "yaml"
    return f"# `{name}`\n\n````{kind}\n{example.read_text(encoding='utf-8')}````\n"


def table_of_examples() -> str:
    """A page that says what each script is for."""
    lines = ["# Examples", "", "Scripts to read, copy and change. A test runs each with few steps."]
    lines += ["", "| script | what it does |", "|---|---|"]
    for path in EXAMPLES:
        name = path.relative_to(ROOT).as_posix()
        said = ""
        if path.suffix == ".py":
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        else:
            said = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        said = " ".join(said.split("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| [`{name}`]({name.removeprefix('examples/')}.md) | {said} |")
    return "\n".join(lines) + "\n"


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for name, held in ELSEWHERE.items():
        files.append(
            File.generated(config, name, content=(ROOT / held).read_text(encoding="utf-8"))
        )
    files.append(File.generated(config, "examples/index.md", content=table_of_examples()))
    for path in EXAMPLES:
        files.append(File.generated(config, page_of(path), content=code_of(path)))
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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes a link of every script and notebook that a page names."""
    places = {path.relative_to(ROOT).as_posix(): page_of(path) for path in EXAMPLES}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        places[f"notebooks/{path.name}"] = f"notebooks/{path.name}"
    here = posixpath.dirname(page.file.src_uri)

    def linked(match: re.Match[str]) -> str:
        place = places.get(match[1])
        return f"[{match[0]}]({posixpath.relpath(place, here or '.')})" if place else match[0]

    # not within a link, nor in the heading of the script's own page
    return re.sub(r"(?<!# )(?<!\[)`((?:examples|notebooks)/[\w/.]+)`(?!\])", linked, markdown)


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
