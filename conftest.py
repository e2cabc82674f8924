"""What every test and doctest sees: torch in doctests, memory from torch.empty full of NaN, the
judge's rows."""

import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from tests.support import equivalence

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on CPU tensors; read when they are imported


def pytest_addoption(parser):
    parser.addoption(
        "--write-numerics", action="store_true", help="write docs/numerics.md from the judge's rows"
    )
    parser.addoption(
        "--device", help="where what is judged runs (default: a GPU where there is one)"
    )
    parser.addoption("--expect-wheel", help="fail unless the packages come from this folder")


def pytest_configure(config):
    torch.set_num_threads(1)
    equivalence.DEVICE = config.getoption("--device") or (
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    folder = config.getoption("--expect-wheel")
    if folder:
        for package in ("heads", "kronecker", "mergekit_lite", "model_components", "thinker"):
            found = importlib.util.find_spec(package)
            if found is None or not Path(found.origin or "").resolve().is_relative_to(
                Path(folder).resolve()
            ):
                raise pytest.UsageError(
                    f"{package} comes from {found and found.origin}, not from {folder}"
                )


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--write-numerics") and exitstatus == 0:
        equivalence.write_numerics(Path(__file__).parent / "docs" / "numerics.md")


def pytest_unconfigure(config):
    gc.unfreeze()  # else nanobind reports every object of its own as leaked


@pytest.fixture(autouse=True)
def _in_every_doctest(doctest_namespace):
    doctest_namespace["torch"] = torch


@pytest.fixture(autouse=True, scope="module")
def _imported_objects_are_not_searched():
    """Exempt all objects that exist from garbage collection.

    accelerate collects after every training, which took a third of a second with everything that
    is imported.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """A result that torch.empty left unwritten must show: torch fills it with NaN in deterministic
    mode.

    On a GPU that mode takes other kernels, and warns of those that it has not.
    """
    if torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
