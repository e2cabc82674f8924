"""The output folder of a merge.

Shards are written to a folder under a hidden name. When all files are written, the folder gets its
final name.

The hidden folder also contains `progress.json`, with a fingerprint of the plan and its inputs, and
the hashes of complete shards. If the merge is interrupted, a later run of the same merge keeps the
shards whose hashes still match, and writes the other shards again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from model_components._folders import NewFolder, OutputError, write_json

from ..dtypes import Array, byte_view
from ..planning import MergePlan, TensorPlan, shard_header, size_text
from .beside import MANIFEST, manifest, write_beside
from .hashing import hash_file


def plan_fingerprint(plan: MergePlan, seed: int, version: str) -> str:
    """Return a hash that is equal for runs that would write the same bytes.

    With a custom method, the hash differs in every run, because the method's function may have
    changed.
    """
    methods = "own"
    tensors = []
    for t in plan.tensors:
        module: str | None = "mergekit_lite."
        if t.method is not None:
            module = t.method.function.__module__  # None for code that `exec` ran
        if module is None or not module.startswith("mergekit_lite."):
            methods = os.urandom(16).hex()  # the function may have been edited
        parts = [info.name for info in t.parts]
        tensors.append([t.name, t.dtype.name, list(t.shape), t.shard, t.offset, parts])
    described = {
        "version": version,
        "recipe": plan.recipe.to_yaml(),
        "methods": methods,
        "seed": seed,
        "sources": [[source.label, source.fingerprint()] for source in plan.sources],
        "tensors": tensors,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class OutputFolder(NewFolder):
    """The output folder of one merge, locked while the merge writes to it.

    Args:
        out: The final path.
        plan: The plan of the merge.
        fingerprint: The result of `plan_fingerprint`.
        fresh: Remove the files that an earlier run left.

    Raises:
        OutputError: The final path is taken, or cannot be written.
    """

    def __init__(self, out: Path, plan: MergePlan, fingerprint: str, *, fresh: bool = False):
        super().__init__(out, "merge", resumable=True, fresh=fresh)
        self._plan = plan
        self._fingerprint = fingerprint
        self.finished: dict[str, str] = {}
        """The hashes of complete shards, by file name."""
        self._descriptor: int | None = None  # the file of the shard that is being written
        self.members: list[list[TensorPlan]] = [[] for _ in plan.shards]
        for t in plan.tensors:
            self.members[t.shard].append(t)
        self._body = [len(shard_header(members)) for members in self.members]

    @property
    def _progress(self) -> Path:
        return self.place / "progress.json"

    def prepare(self) -> None:
        """Open the hidden folder, and keep the shards that an interrupted run of this merge wrote.

        Raises:
            OutputError: Another run is writing to the folder, the folder was not made by this
                library, or the disk has too little free space.
        """
        self.open()
        try:
            self._keep_finished()
            self.clear(keep=self.finished)
            self._save_progress()
            left = 0
            for name, members in zip(self._plan.shards, self.members, strict=True):
                if name not in self.finished:
                    left += sum(t.nbytes for t in members)
            # after clearing, so that the freed space counts
            free = shutil.disk_usage(self.folder).free
            if left > free:
                # keep finished shards for a later run with more space, but remove an empty folder
                if not self.finished:
                    self.discard()
                text = (
                    f"expected {size_text(left)} of free disk space, got {size_text(free)}; free "
                    f"{size_text(left - free)} more"
                )
                raise OutputError(f"merge to {self.out}: {text}")
        except BaseException:
            self.close()
            raise

    def _keep_finished(self) -> None:
        """Find the shards of an earlier run of this merge that still have the recorded hash."""
        try:
            record = json.loads(self._progress.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return
        if not isinstance(record, dict) or record.get("fingerprint") != self._fingerprint:
            return
        shards = record.get("shards")
        for name, digest in shards.items() if isinstance(shards, dict) else ():
            path = self.folder / name
            # the record may have been edited: use only names from the plan as paths
            if name in self._plan.shards and path.is_file() and digest == hash_file(path):
                self.finished[name] = digest

    def _save_progress(self) -> None:
        write_json(self._progress, {"fingerprint": self._fingerprint, "shards": self.finished})

    def open_shard(self, shard: int) -> None:
        """Create the shard's file with its header and full length, and open it for writing."""
        members = self.members[shard]
        path = self.folder / self._plan.shards[shard]
        with path.open("wb") as file:
            file.write(shard_header(members))
            file.truncate(self._body[shard] + sum(t.nbytes for t in members))
        self._descriptor = os.open(path, os.O_WRONLY)

    def write(self, t: TensorPlan, start: int, values: Array) -> None:
        """Write values of a tensor, from index ``start`` on.

        Several threads may call this at once.
        """
        assert self._descriptor is not None
        position = self._body[t.shard] + t.offset + start * t.dtype.itemsize
        data = byte_view(values)
        done = 0
        while done < len(data):
            # pwrite shares no file offset between threads, and may write less than it is given
            done += os.pwrite(self._descriptor, data[done:], position + done)

    def close_shard(self) -> None:
        """Close the file of the current shard, if it is open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def finish(self, name: str) -> None:
        """Hash a complete shard, and record the hash."""
        self.finished[name] = hash_file(self.folder / name)
        self._save_progress()

    def close(self) -> None:
        """Close the open file and release the lock, but keep written shards for a later run."""
        self.close_shard()
        super().close()

    def discard(self) -> None:
        """Remove everything that this run wrote.

        The current shard is closed first, because some network file systems keep open files.
        """
        self.close_shard()
        super().discard()

    def complete(self, seed: int, trust_remote_code: bool) -> None:
        """Write all files other than the shards, then give the folder its final name."""
        plan = self._plan
        folder = self.folder
        if len(plan.shards) > 1:
            weight_map = {}
            for t in plan.tensors:
                for info in t.stored:
                    weight_map[info.name] = plan.shards[t.shard]
            sizes = {"total_size": plan.bytes_written, "total_parameters": plan.parameters}
            index = {"metadata": sizes, "weight_map": weight_map}
            # from STEM-00001-of-00002.safetensors, where the stem may contain dashes
            stem = plan.shards[0].rsplit("-", 3)[0]
            write_json(folder / f"{stem}.safetensors.index.json", index)
        write_beside(plan, folder, trust_remote_code)
        hashes = {name: self.finished[name] for name in plan.shards}
        write_json(folder / MANIFEST, manifest(plan, seed, hashes))
        # last, because a published folder counts as complete
        self.publish()
