"""`MergeReport`: what a merge did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model_components._report import Report


@dataclass(frozen=True)
class MergeReport(Report):
    """Report of what a merge did.

    Args:
        out: The output folder.
        paths: Its weight files.
        bytes_read: Size of the inputs in bytes; some methods read them twice or more.
        bytes_written: Size of the output's tensors in bytes.
        seconds: Wall time.
        cpu_seconds: CPU time of this process, all threads.
        peak_memory: Largest resident size of this process so far, in bytes, imports included.
        resumed: Weight files that an earlier, interrupted run had finished.
        tensors: For each tensor its name, shape, dtype, method and file.
        notes: Notes for the user.
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
        """Return sizes, time and memory."""
        files = f"{len(self.paths)} file{'s' if len(self.paths) > 1 else ''}"
        return [
            f"{len(self.tensors)} tensors, {self.bytes_written / 1e6:.1f} MB in {files} at "
            f"{self.out}",
            f"{self.seconds:.1f} s, {self.cpu_seconds:.1f} CPU s, peak "
            f"{self.peak_memory / 1e6:.0f} MB",
        ]

    def remarks(self) -> list[str]:
        """List how many files an interrupted run had finished, and the notes."""
        resumed = (
            f"{len(self.resumed)} of {len(self.paths)} files were kept from an interrupted run"
        )
        return [*([resumed] if self.resumed else []), *(f"note: {text}" for text in self.notes)]
