from ._model_folders import push_to_hub
from ._version import __version__

__all__ = ["__version__", "push_to_hub"]
