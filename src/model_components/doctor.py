"""Check whether another distribution has overwritten packages of this library.

Unrelated distributions on PyPI are called ``kronecker`` and ``thinker``. When one of them is
installed, pip overwrites the ``__init__.py`` of our package without a warning. When it is
uninstalled, pip removes this file.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from ._report import Report
from ._version import __version__

DISTRIBUTION = "model-components"
PACKAGES = ("heads", "kronecker", "mergekit_lite", "thinker")
_SIGN = "model_components"  # each of our __init__.py files imports it; unrelated packages do not
_SHOWN = (
    "torch",
    "transformers",
    "safetensors",
    "peft",
    "accelerate",
    "huggingface_hub",
    "numpy",
    "matplotlib",
)


@dataclass(frozen=True)
class Finding:
    """A damaged package: the problem, and the command that repairs it."""

    package: str
    problem: str
    repair: str

    def __str__(self) -> str:
        return f"{self.package}: {self.problem}\n  repair: {self.repair}"


def _is_ours(package: str, root: Path) -> bool:
    try:
        return _SIGN in (root / package / "__init__.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def other_distributions(package: str) -> list[str]:
    """Return the other installed distributions that contain a package of the given name."""
    import importlib.metadata  # slow, and needed only if something is wrong

    owners = importlib.metadata.packages_distributions().get(package, [])
    # metadata may spell a name with _ or with -
    return sorted({name for name in owners if name.lower().replace("_", "-") != DISTRIBUTION})


def examine(root: Path | None = None) -> list[Finding]:
    """Return the damaged packages of the installation, or an empty list if there are none.

    Args:
        root: The folder that holds the packages; default: the folder of this installation.

    >>> examine()
    []
    """
    root = root or Path(__file__).parent.parent
    findings = []
    for package in PACKAGES:
        if _is_ours(package, root):
            continue
        others = other_distributions(package)
        if others:
            problem = f"the distribution {', '.join(others)} has overwritten {root / package}"
        else:
            problem = (
                f"{root / package / '__init__.py'} is missing or not ours; another distribution "
                "may have removed or replaced it"
            )
        remove = f"pip uninstall -y {' '.join(others)} && " if others else ""
        # --force-reinstall, because pip considers our packages intact; --no-deps, to keep torch
        findings.append(
            Finding(
                package, problem, f"{remove}pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
        )
    return findings


def warn_of_overwritten() -> None:
    """Warn about packages that another distribution has overwritten.

    This reads four short files, which is fast enough to be done at every import.
    """
    root = Path(__file__).parent.parent
    if not all(_is_ours(package, root) for package in PACKAGES):
        for finding in examine(root):
            warnings.warn(f"model-components: {finding}", RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class DoctorReport(Report):
    """The report of `doctor`.

    Attributes:
        version: The version of model-components.
        python: The version of Python.
        dependencies: The installed version of each dependency; None if it is not installed.
        findings: Damaged packages.
        shared: For each intact package, the other distributions that have a package of its name.
    """

    version: str
    python: str
    dependencies: dict[str, str | None]
    findings: list[Finding]
    shared: dict[str, list[str]]

    @property
    def exit_status(self) -> int:
        """The exit status: 1 if something needs repair, else 0."""
        return int(bool(self.findings))

    def summary(self) -> list[str]:
        """List the versions of this library, of Python and of the dependencies."""
        lines = [f"model-components {self.version}, Python {self.python}"]
        for name, version in self.dependencies.items():
            lines.append(f"  {name} {version or 'is not installed'}")
        return lines

    def remarks(self) -> list[str]:
        """List the damaged packages, and possible conflicts."""
        lines = [str(finding) for finding in self.findings]
        for package, others in self.shared.items():
            lines.append(
                f"{package}: intact, but the distribution {', '.join(others)} has a package of "
                "that name, too; if that distribution is upgraded or uninstalled, our package "
                "breaks"
            )
        if not self.findings:
            lines.append("all four packages are intact")
        return lines


def doctor() -> DoctorReport:
    """Look for packages that another distribution has overwritten, and print versions.

    The exit status is 1 if something needs repair.
    """
    import importlib.metadata

    versions: dict[str, str | None] = {}
    for name in _SHOWN:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    findings = examine()
    overwritten = {finding.package for finding in findings}
    shared = {}
    for package in PACKAGES:
        # if the other distribution is upgraded or uninstalled, our package breaks
        if package not in overwritten and (others := other_distributions(package)):
            shared[package] = others
    return DoctorReport(__version__, sys.version.split()[0], versions, findings, shared)
