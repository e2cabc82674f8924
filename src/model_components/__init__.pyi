from ._model_folders import push_to_hub
from ._trainer import DeadRunError
from ._version import __version__
from .kernels import measure_kernels, set_impl_

__all__ = ["DeadRunError", "__version__", "measure_kernels", "push_to_hub", "set_impl_"]
