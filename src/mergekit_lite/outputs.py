"""The output folder: shards written in place in a hidden folder beside the target, which is renamed when whole.

`progress.json` beside the result lists the shards that are complete, by hash, under a fingerprint of the plan
and its inputs. A later run of the same merge keeps the shards whose bytes still have that hash and redoes the rest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from model_components._folders import NewFolder, OutputError, write_json

from .checkpoint import byte_view
from .plan import MergePlan, PlanError, TensorPlan, header_bytes
from .vocabulary import TOKENIZER_FILES

_COPIED = ("generation_config.json", "preprocessor_config.json", "modeling_*.py", "configuration_*.py")
MANIFEST = "merge_manifest.json"


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plan_fingerprint(plan: MergePlan, seed: int, version: str) -> str:
    """Equal for two runs that would write the same bytes."""
    described = {
        "version": version,
        "recipe": plan.recipe.to_dict(),
        "seed": seed,
        "sources": [[s.label, s.fingerprint()] for s in plan.sources],
        "tensors": [[t.name, str(t.dtype), list(t.shape), t.shard, t.offset] for t in plan.tensors],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class OutputFolder(NewFolder):
    """One run's hold on an output folder; rank 0 opens it, the other ranks only write tensors into it.

    Args:
        out: The final name.
        plan: What will be written.
        fingerprint: From `plan_fingerprint`.

    Raises:
        OutputError: The final name is taken, or cannot be written.
    """

    def __init__(self, out: Path, plan: MergePlan, fingerprint: str):
        super().__init__(out, "merge", resumable=True)
        self._plan, self._fingerprint = plan, fingerprint
        self.finished: dict[str, str] = {}
        self._descriptors: dict[int, int] = {}
        self._members: list[list[TensorPlan]] = [[] for _ in plan.shards]
        for t in plan.tensors:
            self._members[t.shard].append(t)
        self._body = [len(header_bytes(members)) for members in self._members]

    @property
    def _progress(self) -> Path:
        return self.place / "progress.json"

    def prepare(self, resume: bool) -> None:
        """Open the hidden folder and decide what of it is kept.

        Args:
            resume: Keep what an interrupted run of the same merge finished.

        Raises:
            OutputError: Another run is writing it, it is not ours, or the disk is too small.
        """
        self.open()
        try:
            if resume:
                self._keep_finished()
            self.clear(keep=self.finished)
            self._save_progress()
            left = sum(t.nbytes for t in self._plan.tensors if self._plan.shards[t.shard] not in self.finished)
            free = shutil.disk_usage(self.folder).free
            if left > free:
                if not self.finished:
                    self.discard()
                text = f"needs {left / 1e9:.2f} GB of disk and {free / 1e9:.2f} GB are free"
                raise OutputError(errno.ENOSPC, f"merge to {self.out}: {text}")
        except BaseException:
            self.close()
            raise

    def _keep_finished(self) -> None:
        """Find the shards that an earlier run of this merge recorded and that still have the recorded hash."""
        try:
            record = json.loads(self._progress.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if not isinstance(record, dict) or record.get("fingerprint") != self._fingerprint:
            return
        shards = record.get("shards")
        for name, digest in shards.items() if isinstance(shards, dict) else ():
            path = self.folder / name
            if name in self._plan.shards and path.is_file() and file_hash(path) == digest:
                self.finished[name] = digest

    def _save_progress(self) -> None:
        write_json(self._progress, {"fingerprint": self._fingerprint, "shards": self.finished})

    def create(self, shard: int) -> None:
        """Make the shard's file with its header and full length."""
        with (self.folder / self._plan.shards[shard]).open("wb") as file:
            file.write(header_bytes(self._members[shard]))
            file.truncate(self._body[shard] + sum(t.nbytes for t in self._members[shard]))

    def write(self, t: TensorPlan, start: int, values: Tensor) -> None:
        """Put elements ``start`` onwards of a tensor in their place; safe from any thread."""
        descriptor = self._descriptors[t.shard]
        position = self._body[t.shard] + t.offset + start * t.dtype.itemsize
        data = byte_view(values.contiguous())
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], position + done)

    def open_shard(self, shard: int) -> None:
        """Get ready to write into a shard that was created."""
        self._descriptors[shard] = os.open(self.folder / self._plan.shards[shard], os.O_WRONLY)

    def close_shard(self, shard: int) -> None:
        """No more writes to this shard by this process."""
        os.close(self._descriptors.pop(shard))

    def finish(self, shard: int) -> None:
        """Record a shard as complete."""
        name = self._plan.shards[shard]
        self.finished[name] = file_hash(self.folder / name)
        self._save_progress()

    def close(self) -> None:
        """Let go of the lock and of open files, keeping what is written for a later run."""
        self._close_shards()
        super().close()

    def discard(self) -> None:
        """Remove everything of this run; files that are open would stay on some network file systems."""
        self._close_shards()
        super().discard()

    def _close_shards(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def complete(self, facts: Sequence[dict[str, Any]], seed: int, version: str) -> None:
        """Write everything that is not a tensor, then give the folder its final name."""
        plan, folder = self._plan, self.folder
        if len(plan.shards) > 1:
            index = {
                "metadata": {"total_size": plan.bytes_written, "total_parameters": plan.parameters},
                "weight_map": {t.name: plan.shards[t.shard] for t in plan.tensors},
            }
            write_json(folder / "model.safetensors.index.json", index)
        if plan.config:
            write_json(folder / "config.json", plan.config)
        self._copy_beside(folder)
        (folder / "mergekit_config.yml").write_text(plan.recipe.to_yaml(), encoding="utf-8")
        (folder / "README.md").write_text(model_card(plan), encoding="utf-8")
        manifest = {
            "made_by": f"mergekit_lite {version}",
            "recipe": plan.recipe.to_dict(),
            "seed": seed,
            "sha256": {name: self.finished[name] for name in plan.shards},
            "tensors": list(facts),
        }
        write_json(folder / MANIFEST, manifest)
        self.publish()

    def _copy_beside(self, folder: Path) -> None:
        donor = self._plan.sources[self._plan.donor].folder
        if donor is not None:
            for pattern in _COPIED:
                for path in donor.glob(pattern):
                    shutil.copyfile(path, folder / path.name)
        if self._plan.vocabulary is not None:
            self._plan.vocabulary.write_tokenizer(folder)
        else:
            folders = [donor, *(s.folder for s in self._plan.sources)]
            tokenizers = [f for f in folders if f and any((f / n).exists() for n in TOKENIZER_FILES)]
            for name in TOKENIZER_FILES:
                if tokenizers and (tokenizers[0] / name).exists():
                    shutil.copyfile(tokenizers[0] / name, folder / name)
        template = chosen_template(self._plan)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
            settings = folder / "tokenizer_config.json"
            if settings.exists():
                held = json.loads(settings.read_text(encoding="utf-8"))
                held.pop("chat_template", None)
                write_json(settings, held)


def _template_of(folder: Path | None) -> str | None:
    if folder is None:
        return None
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    held = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.exists() else None
    return held if isinstance(held, str) else None


def chosen_template(plan: MergePlan) -> str | None:
    """The chat template that the recipe asks for; None to leave what the tokenizer has.

    Raises:
        PlanError: ``auto`` where no model has one, or a name that is no template.
    """
    asked = plan.recipe.chat_template
    if asked is None:
        return None
    if asked == "auto":
        found = [t for s in plan.sources if (t := _template_of(s.folder)) is not None]
        if not found:
            raise PlanError(["chat_template auto: none of the models has a chat template"])
        return max(found, key=found.count)
    if "{" in asked:
        return asked
    if Path(asked).is_file():
        return Path(asked).read_text(encoding="utf-8")
    raise PlanError(
        [f"chat_template {asked!r}: is not auto, not Jinja text and not a file; named templates are not kept"]
    )


def model_card(plan: MergePlan) -> str:
    """A README for the merged checkpoint."""
    bases = "".join(f"- {s.label}\n" for s in plan.sources)
    return (
        "---\nlibrary_name: transformers\ntags:\n- merge\n- model-components\n---\n"
        f"# {plan.recipe.merge_method} merge\n\nMade by `mergekit_lite` from\n\n{bases}\n"
        f"with this recipe:\n\n```yaml\n{plan.recipe.to_yaml()}```\n"
    )
