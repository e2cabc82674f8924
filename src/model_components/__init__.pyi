from ._model_folders import push_to_hub
from ._trainer import DeadRunError
from ._version import __version__

__all__ = ["DeadRunError", "__version__", "push_to_hub"]
