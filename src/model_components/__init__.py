"""The floor under `mergekit_lite`, `kronecker`, `thinker` and `heads`.

Its public names are ``__version__``, `push_to_hub`, which uploads a folder that a package wrote,
`measure_kernels` and `set_impl_`, which find and set how layers are computed, and `DeadRunError`,
with which every trainer stops a run that cannot succeed.

>>> import model_components
>>> model_components.__version__.count(".")
2

``model-components doctor`` looks whether the installation is whole.
"""

from ._lazy import attach
from .doctor import warn_of_overwritten

__getattr__, __dir__, __all__ = attach(__name__, __file__)

warn_of_overwritten()
