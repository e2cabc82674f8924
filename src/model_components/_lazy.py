"""Import the public names of a package on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lazy_loader

# one lock for all packages; reentrant, because importing one name may load others
_LOCK = threading.RLock()


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list], list]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package, from its stub.

    Only one thread at a time imports a name, because two threads cannot import transformers at the
    same time.

    Args:
        package: The package's ``__name__``.
        file: The package's ``__file__``; the stub is in the same folder.
    """
    load, names, public = lazy_loader.attach_stub(package, file)

    def load_alone(name: str) -> Any:
        with _LOCK:
            return load(name)

    return load_alone, names, public
