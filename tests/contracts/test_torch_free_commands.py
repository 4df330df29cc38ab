"""What does not train does not pay for torch: only the script's own process may import it."""

import pytest

COMMANDS = (
    "--help",
    "--version",
    "run --help",
    "presets --help",
    "presets list",
    "presets show O1",
    "presets show O2 --origin --dtype bfloat16",
    "presets validate own.yaml",
    "report --help",
    "report",
    "report -v",
    "report --format json",
    "run -O O1 script.py",
)
# Start-up time is the number of modules loaded: counted, it is the same on every machine.
MOST_MODULES = 250


@pytest.fixture(scope="session")
def runs(processes, all_of, tmp_path_factory):
    """Each command in a folder with a finished run, where importing torch ends the process."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "own.yaml").write_text("schema: 1\nextends: O1\n")
    (folder / "script.py").write_text("print('ran')\n")
    (folder / "imports.py").write_text("import torch\n")
    trap = folder / "trap" / "torch"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    environ = {"PYTHONPATH": str(trap.parent)}
    python, *mpx, _ = processes.command
    finished = processes.start((python, *mpx, "run", "-qq", "-O", "O0", "script.py"), cwd=folder, **environ)
    finished.result().succeeded()
    asked = {name: (python, "-X", "importtime", *mpx, *name.split()) for name in COMMANDS}
    asked["the trap"] = (python, *mpx, "run", "-O", "O1", "imports.py")
    return all_of({name: processes.start(words, cwd=folder, **environ) for name, words in asked.items()})


def loaded(outcome):
    lines = [line.split("|") for line in outcome.stderr.splitlines() if line.startswith("import time:")]
    return {words[2].strip() for words in lines}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_never_imports_torch(runs, name):
    assert not {"torch", "numpy"} & loaded(runs[name].succeeded())
    assert "click" in loaded(runs[name])  # it does tell what is imported
    assert runs[name].stdout


def test_an_import_of_torch_would_be_seen(runs):
    assert runs["the trap"].returncode == 1
    assert "torch was imported" in runs["the trap"].stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_starts_with_few_modules(runs, name):
    assert len(loaded(runs[name])) < MOST_MODULES


@pytest.mark.parametrize("name", ["--help", "--version"])
def test_help_loads_no_command(runs, name):
    modules = {module.partition(".")[0] for module in loaded(runs[name])}
    assert not {"yaml", "rich"} & modules
    assert not {"mpx.presets", "mpx.record", "mpx.report", "mpx.launch"} & loaded(runs[name])
