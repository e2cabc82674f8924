"""Code shared by `mergekit_lite`, `kronecker`, `thinker` and `heads`.

The public names are:

- ``__version__``: the version of the library.
- `push_to_hub`: upload a folder that one of the packages wrote.
- `measure_kernels` and `set_impl_`: measure and set the implementation of layers.
- `DeadRunError`: raised by every trainer to stop a run that cannot succeed.

>>> import model_components
>>> model_components.__version__.count(".")
2

``model-components doctor`` checks whether the installation is intact.
"""

from ._lazy import attach
from .doctor import warn_of_overwritten

__getattr__, __dir__, __all__ = attach(__name__, __file__)

warn_of_overwritten()
