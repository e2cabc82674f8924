"""Write all files of a merged model except its weights.

These are the config, tokenizer, chat template, model card, and the manifest of the merge. The donor
is the model that provides the config, tokenizer and other files of the merged model.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from model_components._folders import write_json
from model_components._formats import reading, stamp
from model_components._hub import cached_commit, hub_id
from model_components._model_folders import card_of, copy_companions, shown_name

from ..files import CheckpointError, Source
from ..files.headers import read_json
from ..planning import MergePlan
from ..recipe import MergeRecipe, model_label
from ..recipe.templates import TEMPLATES
from ..vocabulary import copy_tokenizer

MANIFEST = "merge_manifest.json"
# files in a model's folder that are always copied, because they contain no code
_COPIED = ("generation_config.json",)
# files in a model's folder that transformers may run
_CODE = ("modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py")


def _donor_folder(plan: MergePlan) -> Path | None:
    return plan.sources[plan.donor].folder


def foreign_code(plan: MergePlan) -> list[str]:
    """Return the names of the donor's Python files that transformers may run as remote code."""
    folder = _donor_folder(plan)
    names: set[str] = set()
    if folder is not None:
        for pattern in _CODE:
            names |= {path.name for path in folder.glob(pattern)}
    return sorted(names)


def code_note(plan: MergePlan, trust_remote_code: bool) -> list[str]:
    """Return a list with a note if the donor has custom code, else an empty list."""
    files = foreign_code(plan)
    donor = plan.sources[plan.donor].label
    if not files and "auto_map" not in plan.config:
        return []
    names = ", ".join(files) or "code on the hub"
    if trust_remote_code:
        return [
            f"{donor} has custom code ({names}), which was copied and runs when the output is "
            "loaded"
        ]
    return [
        f"{donor} has custom code ({names}), which was not copied; to copy it, set "
        "trust_remote_code=True"
    ]


def write_beside(plan: MergePlan, folder: Path, trust_remote_code: bool) -> None:
    """Write every file but the weights, the index and the manifest."""
    config = dict(plan.config)
    if not trust_remote_code:
        # auto_map names classes in files that are not copied
        config.pop("auto_map", None)
    if config:
        write_json(folder / "config.json", config)
    donor = _donor_folder(plan)
    patterns = (*_COPIED, *_CODE) if trust_remote_code else _COPIED
    if donor is not None:
        copy_companions(donor, folder)
        for pattern in patterns:
            for path in donor.glob(pattern):
                # files in a hub cache are links, so copy their contents
                shutil.copyfile(path, folder / path.name)
    _write_tokenizer(plan, folder, trust_remote_code)
    (folder / "mergekit_config.yml").write_text(plan.recipe.to_yaml(), encoding="utf-8")
    (folder / "README.md").write_text(model_card(plan), encoding="utf-8")


def _write_tokenizer(plan: MergePlan, folder: Path, trust_remote_code: bool) -> None:
    """Write the tokenizer, and the chat template that the recipe asks for."""
    if plan.vocabulary is not None:
        plan.vocabulary.write_tokenizer(folder)
    else:
        sources = (source.folder for source in plan.sources)
        copy_tokenizer([_donor_folder(plan), *sources], folder)
    settings = folder / "tokenizer_config.json"
    if settings.exists() and not trust_remote_code:
        _without(settings, "auto_map")
    template = chosen_template(plan)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        if settings.exists():
            # older versions of transformers look only in this file, and would use the old template
            _without(settings, "chat_template")


def _without(path: Path, key: str) -> None:
    """Remove a key from a JSON file, if the file has it."""
    data = read_json(path)
    if data.pop(key, None) is not None:
        write_json(path, data)


def _template_of(folder: Path | None) -> str | None:
    """Return the chat template of a model's tokenizer, which may be in one of two files."""
    if folder is None:
        return None
    # if a folder has both files, transformers uses this one
    if (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        with reading(path, "merge"):
            return path.read_text(encoding="utf-8").strip()
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        return None
    template = read_json(settings).get("chat_template")
    # some tokenizers have a list of named templates here instead of a string
    return template.strip() if isinstance(template, str) else None


def chosen_template(plan: MergePlan) -> str | None:
    """Return the chat template that the recipe asks for, or None to keep the tokenizer's."""
    asked = plan.recipe.chat_template
    if asked is None:
        return None
    if asked == "auto":
        templates = [_template_of(source.folder) for source in plan.sources]
        there = [template for template in templates if template is not None]
        # the most frequent template; of equally frequent ones, max returns the first
        return max(there, key=there.count, default=None)
    if asked in TEMPLATES:
        return TEMPLATES[asked]
    if "{" in asked:  # a template as Jinja text
        return asked
    return Path(asked).read_text(encoding="utf-8")


def _id_of(source: Source) -> str | None:
    """Return a model's hub id, or None if it is unknown.

    The id comes from the path of the model's folder in the hub cache, or else from its label.
    """
    if source.folder is not None:
        cached = cached_commit(source.folder)
        if cached is not None:
            return cached[0]
    # a label may be MODEL+ADAPTER, of which only the model's part is a hub id
    return hub_id(source.label.partition("+")[0])


def _labels(recipe: MergeRecipe) -> list[str]:
    """Return the labels of all models that a recipe and its stages name, without duplicates."""
    labels: dict[str, None] = {}
    for model in recipe.mentions():
        names = _labels(model) if isinstance(model, MergeRecipe) else [model_label(model)]
        labels |= dict.fromkeys(names)
    return list(labels)


def _renamed(recipe: object, names: Callable[[str], str], key: str = "") -> object:
    """Return a parsed YAML recipe with every model name replaced by the result of ``names``.

    The path of a chat template is replaced by the name of its file.
    """
    if isinstance(recipe, dict):
        return {name: _renamed(value, names, name) for name, value in recipe.items()}
    if isinstance(recipe, list):
        return [_renamed(value, names, key) for value in recipe]
    if isinstance(recipe, str) and key in ("model", "base_model", "source"):
        return names(recipe)
    if isinstance(recipe, str) and key == "chat_template" and "{" not in recipe:
        return Path(recipe).name
    return recipe


def model_card(plan: MergePlan) -> str:
    """Return the README of the merged checkpoint, without local paths."""
    ids_by_label = {source.label: _id_of(source) for source in plan.sources}
    documents = list(yaml.safe_load_all(plan.recipe.to_yaml()))
    stages = {document.get("name") for document in documents}

    def names(label: str) -> str:
        if label in stages:
            return label
        known = ids_by_label.get(label)
        if known:
            return known
        parts = []
        for part in label.split("+"):
            is_path = "/" in part and hub_id(part) is None
            parts.append(shown_name(part) if is_path else part)
        return "+".join(parts)

    renamed = [_renamed(document, names) for document in documents]
    recipe = yaml.safe_dump_all(renamed, sort_keys=False, allow_unicode=True)
    listed = "".join(f"- {names(label)}\n" for label in _labels(plan.recipe))
    # `card_of` leaves out entries that are not hub ids
    bases = [ids_by_label[source.label] or str(source.folder or "") for source in plan.sources]
    parts = [f"Made by `mergekit_lite` from\n\n{listed}\nwith this recipe:\n\n```yaml\n{recipe}```"]
    title = f"{plan.recipe.merge_method} merge"
    return card_of(title, parts, bases=bases, tags=["merge", "mergekit-lite"], relation="merge")


def manifest(plan: MergePlan, seed: int, hashes: Mapping[str, str]) -> dict[str, object]:
    """Return the manifest: inputs, recipe, seed, tensors and file hashes.

    A resumed merge has the same manifest as one that was not interrupted.
    """
    described: dict[str, object] = {**stamp(1), "recipe": plan.recipe.to_dict()}
    stages = [stage.to_dict() for stage in plan.recipe.stages()]
    if stages:
        described["stages"] = stages
    return described | {
        "seed": seed,
        "inputs": [_described(source) for source in plan.sources],
        "files": dict(hashes),
        "tensors": plan.described_tensors(),
    }


def _described(source: Source) -> dict[str, object]:
    """Return a model's entry in the manifest.

    It includes the hub commit and, for a merged model, the models it was merged from, if known.
    """
    entry: dict[str, object] = {"model": source.label}
    if source.folder is None:
        return entry
    cached = cached_commit(source.folder)
    if cached is not None:
        entry |= {"hub_id": cached[0], "commit": cached[1]}
    if (source.folder / MANIFEST).is_file():
        # a damaged manifest of an input must not stop the merge
        with contextlib.suppress(CheckpointError):
            entry["merged_from"] = read_json(source.folder / MANIFEST).get("inputs")
    return entry
