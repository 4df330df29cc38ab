"""The wheel is complete: it works where there is no source tree beside it."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TINY = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
print(loss.dtype, model.weight.dtype)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from the source tree; hatchling comes from this environment, so nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    succeed([*command, "--wheel-dir", str(folder), str(ROOT)], cwd=folder)
    (built,) = folder.glob("mpx-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a new environment that has the wheel, and borrows torch and the rest from this one.

    A folder that a .pth file adds is searched, but its own .pth files are not read: an editable mpx in it
    stays invisible.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    paths = sysconfig.get_paths("venv" if "venv" in sysconfig.get_scheme_names() else None, vars=scheme)
    borrowed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(paths["purelib"], "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    scripts = Path(paths["scripts"])
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install", "--quiet"]
    succeed([*pip, "--no-deps", "--no-index", str(wheel)], cwd=folder)
    return scripts


def succeed(command: list[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree, without this process's Python settings; it must return 0."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MPX", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_wheel_holds_the_package_and_the_configs_and_nothing_else(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = {file for file in (ROOT / "mpx").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    configs = {file for file in (ROOT / "configs").rglob("*") if file.is_file()}
    expected = {f.relative_to(ROOT).as_posix() for f in kept}
    expected |= {f"mpx/{f.relative_to(ROOT).as_posix()}" for f in configs}
    assert packed == expected


def test_the_licence_travels_with_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_new_environment_does_not_see_the_source_tree(installed, tmp_path):
    code = (
        "import sys, mpx; from mpx.presets.files import configs_dir; "
        "print(mpx.__file__, configs_dir(), *sys.path, sep='\\n')"
    )
    told = succeed([str(installed / "python"), "-c", code], cwd=tmp_path).stdout
    package, configs, *path = told.splitlines()
    assert Path(configs) == Path(package).parent / "configs"
    assert Path(package).is_relative_to(installed.parent)
    assert str(ROOT) not in path


def test_the_installed_command_lists_the_presets_of_the_wheel(installed, tmp_path):
    listed = succeed([str(installed / "mpx"), "presets", "list"], cwd=tmp_path).stdout
    shipped = {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    assert {"O0", "O1", "O2", "O3"} <= shipped
    assert shipped <= set(listed.split())


@pytest.mark.parametrize("command", [["mpx"], ["python", "-m", "mpx"]], ids=" ".join)
def test_the_installed_command_trains(installed, tmp_path, command):
    (tmp_path / "train.py").write_text(TINY)
    started = [str(installed / command[0]), *command[1:]]
    done = succeed([*started, "run", "--opt-level", "O1", "--out", "out", "train.py"], cwd=tmp_path)
    assert done.stdout == "torch.float32 torch.float32\n"
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["exit_code"] == 0
    assert record["preset"]["name"] == "O1"
    assert record["steps"]["attempted"] == 3
