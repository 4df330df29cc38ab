"""What a script sees under `mpx run` is what it sees under plain python."""

import json
import os
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import pytest

# The price of following a process: where the run is, and the hook that waits for torch.
OWN_VARIABLES = {"MPX_RUN", "PYTHONPATH"}
OWN_MODULES = {"mpx", "mpx.launch", "mpx.launch.torch_import", "sitecustomize", "__future__"}


def view(outcome):
    """Split the probe's output into what it saw, without mpx's own traces, and the bytes that follow."""
    assert outcome.returncode == 0, outcome.text
    line, _, rest = outcome.stdout.partition(b"\n")
    seen = json.loads(line)
    seen["environ"] = {key: value for key, value in seen["environ"].items() if key not in OWN_VARIABLES}
    seen["modules"] = sorted(set(seen["modules"]) - OWN_MODULES)
    return seen, rest


def as_script(shell):
    return [shutil.copy(shell.scripts / "whoami.py", shell.cwd / "whoami.py")], {}


def as_relative_script(shell):
    (shell.cwd / "a folder").mkdir()
    shutil.copy(shell.scripts / "whoami.py", shell.cwd / "a folder" / "my script.py")
    return ["a folder/my script.py"], {}


def as_module(shell):
    shell.script("pkg/sub/__init__.py", "")
    shutil.copy(shell.scripts / "whoami.py", shell.cwd / "pkg" / "sub" / "whoami.py")
    return ["-m", "pkg.sub.whoami"], {}


def as_folder(shell):
    (shell.cwd / "app").mkdir()
    shutil.copy(shell.scripts / "whoami.py", shell.cwd / "app" / "__main__.py")
    return ["app"], {}


def as_zip(shell):
    with zipfile.ZipFile(shell.cwd / "app.zip", "w") as archive:
        archive.write(shell.scripts / "whoami.py", "__main__.py")
    return ["app.zip"], {}


def as_standard_input(shell):
    return ["-"], {"stdin": (shell.scripts / "whoami.py").read_bytes()}


FORMS = [as_script, as_relative_script, as_module, as_folder, as_zip, as_standard_input]
ARGUMENTS = ["--opt-level", "X", "--help", "-m", "x", "--", "y", "two words", "$HOME", "", "-q", "--out=z"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_script_sees_what_it_sees_under_python(shell, form):
    words, options = form(shell)
    options = {"stdin": b"a line\nand more"} | options
    plain = shell.python(*words, *ARGUMENTS, **options)
    ours = shell.mpx("-qq", "-O", "O0", *words, *ARGUMENTS, **options)
    assert view(ours) == view(plain)
    assert ours.stderr == plain.stderr
    assert b"UserWarning: a warning of the script" in ours.stderr


def test_dashes_before_a_script_change_nothing(shell):
    words, _ = as_script(shell)
    assert view(shell.mpx("-qq", "-O", "O0", "--", *words, *ARGUMENTS)) == view(
        shell.python(*words, *ARGUMENTS)
    )


def test_as_forces_the_kind(shell):
    words, _ = as_module(shell)
    plain = view(shell.python(*words))
    assert view(shell.mpx("-qq", "-O", "O0", "--as", "module", words[1])) == plain
    assert view(shell.mpx("-qq", "-O", "O0", "--as", "command", sys.executable, *words)) == plain


@pytest.mark.parametrize("before", [None, "", "lib", os.pathsep, f"lib{os.pathsep}{os.pathsep}/nowhere"])
def test_pythonpath_of_the_user_keeps_its_meaning(shell, before):
    words, _ = as_script(shell)
    environ = {} if before is None else {"PYTHONPATH": before}
    plain, _ = view(shell.python(*words, env=environ))
    ours, _ = view(shell.mpx("-qq", "-O", "O0", *words, env=environ))
    assert ours["path"] == plain["path"]


def test_ignored_signals_stay_ignored(shell):
    """As under `nohup`, and for a background job of a shell without job control."""
    words, _ = as_script(shell)

    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    plain, _ = view(shell.python(*words, preexec_fn=ignore))
    ours, _ = view(shell.mpx("-qq", "-O", "O0", *words, preexec_fn=ignore))
    assert ours["dispositions"] == plain["dispositions"]
    assert plain["dispositions"][str(int(signal.SIGHUP))] == repr(signal.SIG_IGN)


def test_open_files_are_handed_on(shell):
    """As for `train.py <(zcat data.gz)`."""
    script = shell.script("read_fd.py", "import os, sys\nprint(os.read(int(sys.argv[1]), 100))\n")
    end, other = os.pipe()
    os.write(other, b"from the pipe")
    os.close(other)
    ours = shell.mpx("-qq", "-O", "O0", script, str(end), pass_fds=[end])
    os.close(end)
    assert ours.stdout == b"b'from the pipe'\n"


def test_the_terminal_is_the_scripts(shell, terminal):
    words, _ = as_script(shell)
    process = terminal([sys.executable, "-m", "mpx", "run", "-qq", "-O", "O0", *words])
    process.type(b"typed\n\x04")
    screen = process.read(until=b"bytes")
    seen = json.loads(next(line for line in screen.splitlines() if line.startswith(b"{")))
    assert (seen["tty"], seen["stdin"]) == ([True] * 3, "typed\n")
    assert process.process.wait() == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("future.py", b"from __future__ import annotations\nprint(1 / 2)\n"),
        ("latin.py", b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9\xfc'), len('\xe9'))\n"),
        ("bom.py", b"\xef\xbb\xbfprint('after the mark')\n"),
        ("source.py", b"import inspect, sys\ndef f(): return 1\nprint(inspect.getsource(f))\n"),
        (
            "late.py",
            b"import atexit, sys\natexit.register(lambda: print(sys.modules['__main__'].__name__))\n",
        ),
        ("broken.py", b"print('never')\nif True\n    pass\n"),
        ("no_module.py", b"import a_module_that_nobody_has\n"),
    ],
)
def test_the_text_of_a_script_is_pythons_business(shell, name, text):
    script = shell.script(name, text)
    plain = shell.python(script)
    ours = shell.mpx("-qq", "-O", "O0", script)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder in which root cannot write either")
def test_a_folder_that_cannot_be_written_is_no_obstacle(shell):
    words, _ = as_script(shell)
    plain = shell.python(*words, cwd="/proc")
    ours = shell.mpx("-O", "O0", *words, cwd="/proc")
    assert view(ours) == view(plain)
    assert "the current folder cannot be written" in ours.text


@pytest.mark.parametrize("command", [["mpx"], [sys.executable, "-m", "mpx"]], ids=["mpx", "python -m mpx"])
def test_both_spellings_of_the_command(shell, command):
    words, _ = as_script(shell)
    if command == ["mpx"]:
        command = [Path(sys.executable).with_name("mpx")]
        if not command[0].exists():
            pytest.skip("mpx is not installed as a command here")
    ours, _ = view(shell.run([*command, "run", "-qq", "-O", "O0", *words]))
    plain, _ = view(shell.python(*words))
    for seen in (ours, plain):  # the console script names the same interpreter by another path
        seen.update(executable="", orig_argv=[], environ={})
    assert ours == plain
