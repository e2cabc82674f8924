"""The floor under `mergekit_lite`, `kronecker`, `thinker` and `heads`.

Private but for the version and the doctor.

>>> import model_components
>>> model_components.__version__.count(".")
2

``python -m model_components doctor`` looks whether the installation is whole.
"""

from ._version import __version__
from .doctor import warn_of_overwritten

__all__ = ["__version__"]

warn_of_overwritten()
