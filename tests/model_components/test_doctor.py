"""A namesake on PyPI overwrites a package of ours: import and doctor say which distribution it was,
and the repair."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import model_components
from model_components.doctor import PACKAGES, examine

SOURCE = Path(model_components.__file__).parent.parent


@pytest.fixture
def site(tmp_path):
    """A folder of installed packages: our four __init__.py and the floor, with the metadata that
    pip writes."""
    folder = tmp_path / "site"
    shutil.copytree(SOURCE / "model_components", folder / "model_components")
    for package in PACKAGES:
        (folder / package).mkdir()
        shutil.copyfile(SOURCE / package / "__init__.py", folder / package / "__init__.py")
    metadata = folder / "model_components-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: model-components\nVersion: 0.1.0\n"
    )
    (metadata / "RECORD").write_text(
        "".join(f"{p}/__init__.py,,\n" for p in ("model_components", *PACKAGES))
    )
    return folder


def wheel_of_namesake(folder, name="kronecker"):
    """A wheel of an unrelated distribution, as PyPI has one."""
    path = folder / f"{name}-9.9-py3-none-any.whl"
    info = f"{name}-9.9.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", '"""Something else entirely."""\n')
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(
            f"{info}/RECORD",
            f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
        )
    return path


def python(site, *arguments):
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=site
    )


def test_a_whole_installation(site):
    assert examine() == examine(site) == []
    done = python(site, "-W", "error", "-m", "model_components", "doctor")
    assert done.returncode == 0, done.stderr
    assert "all four packages are intact" in done.stdout
    assert "torch" in done.stdout
    quick = python(
        site,
        "-c",
        "import sys, model_components; print('torch' in sys.modules, model_components.__version__)",
    )
    assert quick.stdout.split() == ["False", model_components.__version__]


def test_a_namesake_is_named_with_the_line_that_repairs(site, tmp_path):
    name = "thinker"
    wheel = wheel_of_namesake(tmp_path, name)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--upgrade",
        "--target",
    ]
    # pip says nothing of the loss
    subprocess.run([*pip, str(site), str(wheel)], check=True, capture_output=True)
    done = python(site, "-m", "model_components", "doctor")
    assert done.returncode == 1
    repair = f"pip uninstall -y {name} && pip install --force-reinstall --no-deps model-components"
    assert f"{name}: the distribution {name} has overwritten" in done.stdout
    assert repair in done.stdout
    warned = python(site, "-c", "import model_components")
    assert warned.returncode == 0
    assert repair in warned.stderr
    shutil.rmtree(site / name)  # as uninstalling the namesake does
    shutil.rmtree(site / f"{name}-9.9.dist-info")
    done = python(site, "-m", "model_components", "doctor")
    assert done.returncode == 1
    assert f"{name}: {site / name / '__init__.py'} is missing or not ours" in done.stdout
    assert "pip install --force-reinstall --no-deps model-components" in done.stdout


def test_a_namesake_that_lies_beneath_is_told_of(site, tmp_path):
    with zipfile.ZipFile(wheel_of_namesake(tmp_path)) as file:
        file.extractall(site)
    # ours came later
    shutil.copyfile(SOURCE / "kronecker" / "__init__.py", site / "kronecker" / "__init__.py")
    done = python(site, "-m", "model_components", "doctor")
    assert done.returncode == 0
    assert (
        "kronecker: intact, but the distribution kronecker has a package of that name, too"
        in done.stdout
    )
