"""Code shared by `mergekit_lite`, `kronecker`, `thinker` and `heads`.

The public names are ``__version__``, `push_to_hub`, which uploads a folder that a package wrote,
`measure_kernels` and `set_impl_`, which measure and set the implementation of layers, and
`DeadRunError`, which every trainer raises to stop a run that cannot succeed.

>>> import model_components
>>> model_components.__version__.count(".")
2

``model-components doctor`` checks whether the installation is intact.
"""

from ._lazy import attach
from .doctor import warn_of_overwritten

__getattr__, __dir__, __all__ = attach(__name__, __file__)

warn_of_overwritten()
