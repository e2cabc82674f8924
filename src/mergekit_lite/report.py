"""`MergeReport`: the report of a finished merge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model_components._report import Report


@dataclass(frozen=True)
class MergeReport(Report):
    """The report of a finished merge.

    Args:
        out: The output folder.
        paths: The weight files in the output folder.
        bytes_read: Size in bytes of the inputs that this run read. Each counts once, although some
            methods read inputs more than once.
        bytes_written: Size of the output's tensors in bytes.
        seconds: Wall time in seconds.
        cpu_seconds: CPU time of all threads of this process, in seconds.
        peak_memory: Peak resident memory of this process in bytes, with the imported libraries.
        resumed: Weight files that an earlier, interrupted run had finished.
        tensors: The name, shape, dtype, method and file of each output tensor.
        notes: Notes on the merge, such as settings that had no effect.
    """

    out: Path
    paths: list[Path]
    bytes_read: int
    bytes_written: int
    seconds: float
    cpu_seconds: float
    peak_memory: int
    resumed: list[str]
    tensors: list[dict[str, object]]
    notes: list[str]

    def summary(self) -> list[str]:
        """Return the size of the output, and the time and memory that the merge took."""
        files = f"{len(self.paths)} file{'s' if len(self.paths) > 1 else ''}"
        return [
            f"{len(self.tensors)} tensors, {self.bytes_written / 1e6:.1f} MB in {files} at "
            f"{self.out}",
            f"{self.seconds:.1f} s, {self.cpu_seconds:.1f} CPU s, peak "
            f"{self.peak_memory / 1e6:.0f} MB",
        ]

    def remarks(self) -> list[str]:
        """Return the number of files kept from an interrupted run, and the notes."""
        resumed = (
            f"{len(self.resumed)} of {len(self.paths)} files were kept from an interrupted run"
        )
        return [*([resumed] if self.resumed else []), *(f"note: {text}" for text in self.notes)]
