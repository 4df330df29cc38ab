"""Which processes are followed, and that every other one says so."""

import ast
import json
import os
import sys
import venv
from pathlib import Path

import pytest

import mpx
from mpx.launch.target import Target, isolation

BOOT = Path(mpx.__file__).parent / "launch" / "boot" / "sitecustomize.py"
# A process is followed when it would join the run at `import torch`.
IS_FOLLOWED = "any(type(f).__name__ == 'TorchFinder' for f in sys.meta_path)"


def test_its_syntax_is_older_than_any_interpreter_it_may_meet():
    text = BOOT.read_text()
    ast.parse(text, feature_version=(3, 8))
    # Python 2 stops at these, and would say so in every process.
    new = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.YieldFrom, ast.AsyncFunctionDef)
    assert not [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, new)]


FOLLOWED = {
    "spawn, fork and forkserver": """
import multiprocessing, sys
def tell(queue):
    queue.put(FOLLOWED)
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=tell, args=(queue,))
        child.start()
        print(queue.get())
        child.join()
""",
    "a subprocess": """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import sys; print(FOLLOWED)"])
""",
    "a subprocess in another folder": """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import sys; print(FOLLOWED)"], cwd="/")
""",
    "os.fork": """
import os, sys
if os.fork():
    os.wait()
else:
    print(FOLLOWED, flush=True)
    os._exit(0)
""",
    "os.execv": """
import os, sys
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "again"])
print(FOLLOWED)
""",
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_what_a_script_starts_is_followed(shell, how):
    script = shell.script("starts.py", FOLLOWED[how].replace("FOLLOWED", IS_FOLLOWED))
    ours = shell.mpx("-qq", "-O", "O0", script)
    assert ours.returncode == 0, ours.text
    assert set(ours.stdout.split()) == {b"True"}
    assert b"True" not in shell.python(script).stdout


def test_commands_are_followed(shell):
    script = shell.script("tells.py", f"import sys\nprint({IS_FOLLOWED})\n")
    ours = shell.mpx(
        "-qq", "-O", "O0", "--", "sh", "-c", f'"{sys.executable}" "{script}"; "{sys.executable}" -m tells'
    )
    assert ours.stdout == b"True\nTrue\n"


@pytest.fixture
def site(shell):
    """A folder of the user's on PYTHONPATH, for a sitecustomize."""
    (shell.cwd / "site").mkdir()
    shell.environ["PYTHONPATH"] = str(shell.cwd / "site")
    return shell


def test_the_users_own_sitecustomize_runs_and_is_what_scripts_see(site):
    site.script("site/sitecustomize.py", "import sys\nsys.argv_at_start = 'ran'\nvalue = 7\n")
    script = site.script(
        "asks.py", "import sys, sitecustomize as s\nprint(sys.argv_at_start, s.value, s.__file__)\n"
    )
    assert site.mpx("-qq", "-O", "O0", script).stdout == site.python(script).stdout
    assert site.mpx("-qq", "-O", "O0", script).stdout.startswith(b"ran 7 ")


@pytest.mark.parametrize("text", ["raise ValueError('broken')\n", "import not_there_at_all\n"])
def test_a_broken_sitecustomize_is_told_as_by_python(site, text):
    site.script("site/sitecustomize.py", text)
    script = site.script("hello.py", "print('hello')\n")
    plain = site.python(script)
    # Without `mpx run`: its own interpreter would tell the same once more.
    paths = os.pathsep.join([str(BOOT.parent), site.environ["PYTHONPATH"]])
    ours = site.python(script, env={"PYTHONPATH": paths, "MPX_RUN": str(site.cwd)})
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert b"Error in sitecustomize" in ours.stderr


@pytest.fixture
def foreign(shell):
    """An interpreter that has no mpx, and a package named torch."""
    shell.script("lib/torch/__init__.py", "")
    venv.create(shell.cwd / "foreign", with_pip=False, symlinks=True)
    return str(shell.cwd / "foreign" / "bin" / "python")


def test_an_interpreter_without_mpx_goes_on_and_says_that_it_is_not_followed(shell, foreign):
    shell.environ["PYTHONPATH"] = "lib"
    script = shell.script("trains.py", "import sys, torch\nprint('trained', len(sys.meta_path))\n")
    plain = shell.run([foreign, script])
    ours = shell.mpx("-O", "O0", "--", foreign, script)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    (line,) = [line for line in ours.text.splitlines() if line.startswith("mpx: ")]
    assert foreign in line
    assert "runs torch without mpx: No module named 'mpx'" in line
    (notice,) = ours.record["notices"]
    assert f"mpx: {notice}" == line


def test_an_interpreter_without_mpx_is_silent_until_it_imports_torch(shell, foreign):
    script = shell.script("counts.py", "import json\nprint(1)\n")
    ours = shell.mpx("-qq", "-O", "O0", "--", foreign, script)
    assert (ours.stdout, ours.stderr) == (b"1\n", b"")


def test_a_process_that_did_not_get_the_run_says_so(shell):
    """As behind a launcher of many machines that hands on PYTHONPATH and nothing else."""
    shell.script("torch/__init__.py", "")
    script = shell.script("trains.py", "import torch\nprint('trained')\n")
    ours = shell.python(script, env={"PYTHONPATH": str(BOOT.parent)})
    assert (ours.returncode, ours.stdout) == (0, b"trained\n")
    assert "runs torch without mpx: MPX_RUN did not arrive" in ours.text


@pytest.mark.parametrize("flags", [["-E"], ["-I"], ["-S"], ["-sE"]], ids=" ".join)
def test_an_isolated_interpreter_is_named_as_the_reason(shell, flags):
    script = shell.script("hello.py", "print('hello')\n")
    ours = shell.mpx("-O", "O0", "--", sys.executable, *flags, script)
    assert (ours.returncode, ours.stdout) == (0, b"hello\n")
    assert f"`python {flags[0]}` shuts out" in ours.text
    assert "no process imported torch, so nothing ran in mixed precision" in ours.text
    ours = shell.mpx("-qq", "-O", "O0", "--require-instrumented", "--", sys.executable, *flags, script)
    assert ours.returncode == 97


@pytest.mark.parametrize(
    "argv",
    [
        ("python", "-u", "-X", "importtime", "-W", "ignore", "E.py", "-I"),
        ("python3.11", "-Wignore::ImportWarning", "-m", "x", "-E"),
        ("python", "-c", "print()", "-S"),
        ("bash", "-E", "train.sh"),
    ],
)
def test_only_flags_of_the_interpreter_isolate_it(argv):
    assert isolation(Target("command", argv, "python")) is None


def test_require_instrumented_never_hides_the_targets_own_failure(shell):
    ours = shell.mpx("-qq", "-O", "O0", "--require-instrumented", shell.scripts / "end.py", "exit-3")
    assert ours.returncode == 3


def test_a_fault_of_ours_at_the_start_stops_the_script_and_says_whose_it_is(shell):
    """This torch has nothing that the engine needs, so that the engine fails in a way that nobody foresaw."""
    shell.script("torch/__init__.py", "")
    script = shell.script(
        "trains.py", "try:\n    import torch\nexcept Exception:\n    pass\nprint('trained')\n"
    )
    ours = shell.mpx("-O", "O0", script)
    assert (ours.returncode, ours.stdout) == (70, b"")
    assert "Traceback" in ours.text
    assert "this is a fault of mpx, please report it" in ours.text
    assert [fault["where"] for fault in ours.record["faults"]] == ["start"]


def test_a_damaged_preset_is_refused_before_the_scripts_next_line(shell):
    """With the real torch: the engine starts, and finds nothing that it could trust."""
    run = shell.cwd / "run"
    (run / "events").mkdir(parents=True)
    (run / "preset.json").write_text("{")
    script = shell.script(
        "trains.py", "try:\n    import torch\nexcept BaseException:\n    pass\nprint('trained')\n"
    )
    ours = shell.python(script, env={"PYTHONPATH": str(BOOT.parent), "MPX_RUN": str(run)})
    assert (ours.returncode, ours.stdout) == (2, b"")
    assert ours.text.startswith("error: ")
    assert "Traceback" not in ours.text
    events = [
        json.loads(line) for path in (run / "events").iterdir() for line in path.read_text().splitlines()
    ]
    assert [event["event"] for event in events] == ["skipped"]
