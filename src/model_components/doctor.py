"""`doctor`: are the four packages the ones that this distribution installed?

Unrelated distributions on PyPI are called ``kronecker`` and ``thinker``. pip lets them overwrite
our ``__init__.py`` without a word, and takes it away with them when they are uninstalled.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "model-components"
PACKAGES = ("heads", "kronecker", "mergekit_lite", "thinker")
_SIGN = "model_components"  # every __init__.py of ours names the floor


@dataclass(frozen=True)
class Finding:
    """A package that is not ours any more: what is the matter, and the line that repairs it."""

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
    """The installed distributions, but for this one, that have a package of this name."""
    import importlib.metadata  # slow, and needed only where something is wrong

    owners = importlib.metadata.packages_distributions().get(package, [])
    return sorted({name for name in owners if name.lower().replace("_", "-") != DISTRIBUTION})


def examine(root: Path | None = None) -> list[Finding]:
    """Find what is wrong with the installation; nothing, usually.

    Args:
        root: The folder that holds the packages; default: where this one is.

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
                f"{root / package / '__init__.py'} is gone or not ours; another distribution took "
                "it away"
            )
        remove = f"pip uninstall -y {' '.join(others)} && " if others else ""
        findings.append(
            Finding(
                package, problem, f"{remove}pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
        )
    return findings


def warn_of_overwritten() -> None:
    """Warn, at import, of packages that another distribution has overwritten.

    Reads four short files.
    """
    root = Path(__file__).parent.parent
    if not all(_is_ours(package, root) for package in PACKAGES):
        for finding in examine(root):
            warnings.warn(f"model-components: {finding}", RuntimeWarning, stacklevel=3)
