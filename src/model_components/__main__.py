"""``python -m model_components``, which is the command ``model-components``."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
