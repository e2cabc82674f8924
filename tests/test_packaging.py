"""What is built: a wheel whose packages import and whose commands run, an sdist that a test run can
start from.

`make test-wheel` builds both, and runs this file and the doctests against the wheel; elsewhere what
needs them skips.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("heads", "kronecker", "mergekit_lite", "model_components", "thinker")
ROOT = Path(__file__).parents[1]


def built(pattern):
    found = sorted((ROOT / "build" / "wheel").glob(pattern))
    if not found:
        pytest.skip("nothing is built; make test-wheel builds it")
    return found[-1]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed_and_knows_its_version(package):
    code = f"import {package}; from importlib.resources import files; print({package}.__version__)"
    code += f"; assert files({package!r}).joinpath('py.typed').is_file()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.1.0"


@pytest.mark.parametrize(
    "command",
    [
        ("mergekit_lite", "plan", "--help"),
        ("model_components", "convert", "--help"),
        ("model_components", "doctor"),
    ],
)
def test_the_commands_run(command):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_the_packages_and_nothing_else():
    with zipfile.ZipFile(built("*.whl")) as file:
        names = file.namelist()
        metadata = next(file.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == set(PACKAGES)
    assert not [n for n in names if n.endswith(".pyc")]
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
        sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / package).rglob("*.py")}
        assert sources <= set(names)
    for line in (
        "License-Expression: Apache-2.0",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ):
        assert line in metadata
    assert "](docs/" not in metadata  # a link of the README's that works in a checkout alone


def test_a_test_run_can_start_from_the_sdist(tmp_path):
    with tarfile.open(built("*.tar.gz")) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for name in (
        "Makefile",
        "conftest.py",
        "constraints.txt",
        "mkdocs.yml",
        "LICENSE",
        "README.md",
        "CONTRIBUTING.md",
    ):
        assert (folder / name).is_file(), name
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_imports.py",
    ]
    command += ["-k", "layers_load_torch"]  # the other tests take long
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    tests = [
        {str(path.relative_to(root)) for path in (root / "tests").rglob("*.py")}
        for root in (folder, ROOT)
    ]
    assert tests[0] == tests[1]
