"""Run the command ``model-components`` as ``python -m model_components``."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
