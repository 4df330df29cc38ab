"""Who gets the stand-in for apex, for which of its modules, and what a process sees that does not use it.

Packages of a line or two stand in for NVIDIA's, which is known by its folders. Most tests look for modules and import
none, so that no process waits for torch.
"""

import json

import pytest

PARTS = (
    "amp",
    "parallel",
    "optimizers",
    "normalization",
    "fp16_utils",
    "multi_tensor_apply",
    "contrib",
    "RNN",
)
OURS = PARTS[:-2]
ASKS = """
import importlib.util, json, os, sys
def ask(*names):
    return [where(name) for name in names]
def where(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        return None
    return spec and ("ours" if os.path.join("mpx", "apex") in spec.origin else "theirs")
def tell(*answers):
    print(json.dumps(answers))
"""
NVIDIAS = dict.fromkeys(("__init__", "optimizers/__init__", "multi_tensor_apply/__init__"), "")
WITH_AMP = {"amp/__init__": "", "amp/handle": "", "parallel/__init__": ""}


@pytest.fixture
def site(shell):
    """A shell with a folder as pip's. In it lies a library that looks whether there is an apex."""

    def install(files, package=""):
        for name, text in files.items():
            shell.script(f"venv/site-packages/{package}{name}.py", text)

    shell.environ["PYTHONPATH"] = str(shell.cwd / "venv" / "site-packages")
    shell.install = install
    install({"library": ASKS})
    return shell


def told(shell, text, *options, plain=False):
    script = shell.script("asks.py", ASKS + text)
    ours = shell.python(script) if plain else shell.mpx("-qq", "-O", "O1", *options, script)
    assert ours.returncode == 0, ours.text
    return json.loads(ours.stdout)


ALL = f"tell(*ask(*('apex.' + part for part in {PARTS})))\n"


def test_the_script_gets_ours_where_there_is_no_apex_and_nothing_of_what_ours_has_not(site):
    assert told(site, ALL) == ["ours"] * len(OURS) + [None] * 2


@pytest.mark.parametrize("options", [("--apex", "off"), None], ids=["off", "plain python"])
def test_without_it_nothing_is_found(site, options):
    assert set(told(site, ALL, *(options or ()), plain=options is None)) == {None}


def test_a_library_goes_the_way_that_it_goes_without_apex(site):
    """Once the script has apex, amp is there for all: it computes nothing of its own."""
    text = """
import library
before = library.ask("apex", "apex.amp", "apex.normalization")
import apex
after = library.ask("apex", "apex.amp", "apex.normalization", "apex.optimizers")
tell(before, ask("apex.normalization"), after)
"""
    assert told(site, text) == [[None] * 3, ["ours"], ["ours", "ours", None, None]]


def test_apex_has_no_version_for_libraries_that_ask_the_package_index(site):
    text = """
import importlib.metadata
import apex
try:
    tell(importlib.metadata.version("apex"))
except importlib.metadata.PackageNotFoundError:
    tell("none")
"""
    assert told(site, text) == ["none"]


def test_on_gives_it_to_libraries_too_and_instead_of_what_is_installed(site):
    site.install(NVIDIAS | WITH_AMP, "apex/")
    text = "import library\ntell(*library.ask('apex', 'apex.amp', 'apex.optimizers', 'apex.normalization'))\n"
    assert told(site, text, "--apex", "on") == ["ours"] * 4


@pytest.mark.parametrize("asks", ["ask", "library.ask"])
def test_of_an_installed_apex_amp_alone_is_ours_whoever_asks(site, asks):
    site.install(NVIDIAS | WITH_AMP, "apex/")
    text = f"""
import library
tell(*{asks}("apex", "apex.optimizers", "apex.parallel", "apex.amp", "apex.fp16_utils"))
"""
    missing = "ours" if asks == "ask" else None
    assert told(site, text) == ["theirs", "theirs", "theirs", "ours", missing]
    assert told(site, text, "--apex", "off") == ["theirs"] * 4 + [None]


def test_an_installed_apex_that_imports_its_amp_gets_ours(site):
    site.install(NVIDIAS | WITH_AMP | {"__init__": "from . import amp\n"}, "apex/")
    text = """
import apex
from apex.amp import handle
tell("scale_loss" in vars(apex.amp), hasattr(handle, "AmpHandle"))
"""
    assert told(site, text) == [True, True]


def test_an_installed_apex_without_amp_is_completed_for_the_script(site):
    site.install(NVIDIAS, "apex/")
    text = """
import library
before = library.ask("apex.optimizers", "apex.amp")
import apex
tell(before, hasattr(apex.amp, "scale_loss"), hasattr(apex, "nothing"), ask("apex.optimizers", "apex.parallel"))
"""
    assert told(site, text) == [["theirs", None], True, False, ["theirs", "ours"]]


def test_a_package_of_the_users_own_of_that_name_is_left_alone(site):
    site.script("apex/__init__.py", "")
    site.script("apex/learner.py", "")
    assert told(site, "tell(*ask('apex', 'apex.learner', 'apex.amp'))\n") == ["theirs", "theirs", None]


@pytest.mark.parametrize("what", ["a checkout", "what PyPI calls apex"])
def test_what_only_bears_the_name_is_no_apex(site, what):
    if what == "a checkout":
        site.script("apex/setup.py", "")
    else:
        site.install({"apex": "import not_there\n"})
    assert told(site, "tell(*ask('apex.amp'))\n") == ["ours"]


def test_a_process_that_does_not_ask_for_it_loads_nothing(site):
    text = "import json.tool, apexes\ntell(*(name for name in sys.modules if 'apex' in name))\n"
    site.script("apexes.py", "")
    assert told(site, text) == ["apexes"]


def test_children_get_it_too(site):
    site.script("child.py", ASKS + "tell(*ask('apex.amp'))\n")
    text = """
import multiprocessing, subprocess
def put(queue):
    queue.put(ask("apex.amp"))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=put, args=(queue,))
    process.start()
    done = subprocess.run([sys.executable, "child.py"], capture_output=True)
    tell(queue.get(), json.loads(done.stdout))
    process.join()
"""
    assert told(site, text) == [["ours"], ["ours"]]


@pytest.mark.parametrize("what", ["missing for a library", "one that cannot be loaded"])
def test_a_failing_import_is_shown_as_by_python(site, what):
    if what == "missing for a library":
        site.install({"needs_it": "import apex\n"})
    else:
        site.install(NVIDIAS | {"__init__": "def load():\n    raise OSError('no driver')\nload()\n"}, "apex/")
        site.install({"needs_it": "from apex import amp\n"})
    script = site.script("fails.py", "def main():\n    import needs_it\nmain()\n")
    plain, ours = site.python(script), site.mpx("-qq", "-O", "O1", script)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert plain.returncode == 1
