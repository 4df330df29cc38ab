"""The command line of `mpx` and `mpx run`: what is refused, and what happens before the target starts."""

import importlib
import json
import sys
from pathlib import Path

import click
import pytest


@pytest.fixture
def touching(shell):
    """A script that leaves a file when it runs."""
    return shell.script("touches.py", "open('it ran', 'w').close()\n")


def ran(shell):
    return (shell.cwd / "it ran").exists()


def test_help_is_fast_because_it_loads_nothing(shell):
    """Neither torch nor a command, nor what reads presets and draws reports."""
    code = "import sys\nfrom mpx.cli import main\n"
    code += "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    for words in (["--help"], ["--version"]):
        loaded = set(shell.python("-c", code, *words).text.split())
        assert "click" in loaded
        assert not loaded & {
            "torch",
            "yaml",
            "rich",
            "mpx.cli.run",
            "mpx.presets",
            "mpx.record",
            "mpx.report",
        }


def test_help_lists_every_command_in_its_own_words(shell):
    """The lines of the list are written beside it, so that it can be shown without loading the commands."""
    files = [path.stem for path in (Path(__file__).parents[2] / "mpx" / "cli").glob("[a-z]*.py")]
    modules = {name: importlib.import_module(f"mpx.cli.{name}") for name in files}
    commands = [
        name for name, module in modules.items() if isinstance(getattr(module, name, None), click.Command)
    ]
    text = shell.run([sys.executable, "-m", "mpx", "--help"]).stdout.decode()
    listed = {line.split()[0] for line in text.split("Commands:\n")[1].split("\n\n")[0].splitlines()}
    assert listed == set(commands)
    for name in listed:
        done = shell.run([sys.executable, "-m", "mpx", name, "--help"])
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "did you mean `mpx run`?"),
        (["train.py"], "`mpx run train.py` runs a script"),
        (["run"], "there is nothing to run"),
        (["run", "--opt-levle", "O1", "x.py"], "--opt-level"),
        (["run", "-O", "O9", "touches.py"], "O9"),
        (["run", "--set", "loss_scale.init", "touches.py"], "loss_scale.init"),
        (["run", "-O", "nowhere.yaml", "touches.py"], "nowhere.yaml"),
        (["run", "-m", "--as", "script", "touches.py"], "contradicts"),
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_is_refused_and_nothing_runs(shell, touching, words, message):
    done = shell.run([sys.executable, "-m", "mpx", *words])
    assert done.returncode == 2
    assert done.stdout == b""
    assert message in done.text
    assert "Traceback" not in done.text
    assert not ran(shell)
    assert not (shell.cwd / ".mpx").exists()


def test_an_operation_that_nobody_knows_is_refused(shell, touching):
    """torch itself is asked, in a process of its own."""
    done = shell.mpx("-O", "O1", "--fp32-op", "aten::no_such_thing", touching)
    assert done.returncode == 2
    assert "no_such_thing" in done.text
    assert "Traceback" not in done.text
    assert not ran(shell)
    assert not (shell.cwd / ".mpx").exists()


@pytest.mark.parametrize("out", ["/proc/mpx", "taken"])
def test_a_record_that_cannot_be_written_is_refused_before_the_start(shell, touching, out):
    shell.script("taken/file", "")
    done = shell.mpx("-O", "O0", "--out", out, touching)
    assert done.returncode == 2
    assert out in done.text
    assert done.text.startswith("error: the run directory")
    assert not ran(shell)


def test_out_names_the_record(shell, touching):
    done = shell.mpx("-O", "O0", "--out", "here/it is", touching)
    assert done.returncode == 0
    assert json.loads((shell.cwd / "here" / "it is" / "run.json").read_text())["status"] == "completed"
    assert not (shell.cwd / ".mpx").exists()


def test_the_record_says_what_was_run(shell, touching):
    record = shell.mpx("-O", "O0", "--set", "flush_interval_s=2.5", "touches.py", "-x", "two words").record
    assert record["command"] == [
        "mpx",
        "run",
        "-O",
        "O0",
        "--set",
        "flush_interval_s=2.5",
        "touches.py",
        "-x",
        "two words",
    ]
    assert (record["script"], record["target_kind"], record["cwd"]) == (
        "touches.py",
        "script",
        str(shell.cwd),
    )
    assert record["preset"]["name"] == "O0"
    assert record["preset"]["flush_interval_s"] == 2.5
    assert record["origin"]["flush_interval_s"].startswith("--set")
    assert record["wall_s"] > 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["mising.py"], 127, "cannot find the script"),
        (["--", "no-such-command"], 127, "cannot find the command"),
        (["--", "./closed.sh"], 126, "is not executable"),
    ],
)
def test_a_target_that_is_not_there_leaves_no_trace(shell, words, code, message):
    shell.script("closed.sh", "#!/bin/sh\n")
    done = shell.mpx("-O", "O0", *words)
    assert done.returncode == code
    assert message in done.text
    assert "Traceback" not in done.text
    assert not (shell.cwd / ".mpx").exists()


@pytest.mark.parametrize(
    ("head", "code", "message"),
    [
        ("#!/no/such/interpreter\n", 127, "the interpreter in its first line"),
        ("echo\n", 126, "mpx run -- sh ./odd"),
    ],
)
def test_a_target_that_the_system_refuses_gets_a_shells_exit_code(shell, head, code, message):
    shell.script("odd", head).chmod(0o755)
    done = shell.mpx("-O", "O0", "--", "./odd")
    assert done.returncode == code
    assert message in done.text


def test_words_before_the_target_are_ours_and_those_after_it_are_not(shell):
    script = shell.script("shows.py", "import sys\nprint(sys.argv[1:])\n")
    done = shell.mpx("-q", "-O", "O0", script, "--opt-level", "O9", "-q", "--help", "-m", "--", "--out")
    assert done.stdout.decode() == "['--opt-level', 'O9', '-q', '--help', '-m', '--', '--out']\n"


@pytest.mark.parametrize(("flag", "lines"), [("-q", 1), ("-qq", 0)])
def test_quiet_is_quiet(shell, touching, flag, lines):
    assert len(shell.mpx(flag, "-O", "O0", touching).text.splitlines()) == lines


def test_verbose_tells_what_is_started(shell, touching):
    assert (
        f"mpx: starts the script `{sys.executable} touches.py`"
        in shell.mpx("-v", "-O", "O0", "touches.py").text
    )


def test_the_project_file_is_announced(shell, touching):
    shell.script("mpx.yaml", "extends: O0\n")
    done = shell.mpx(touching)
    assert done.returncode == 0, done.text
    assert "mpx.yaml`" in done.text.splitlines()[0]
    assert done.record["preset"]["name"] != "O1"


def test_a_report_that_fails_does_not_change_the_exit_status(shell):
    text = "import glob, os, shutil, sys\nshutil.rmtree(os.path.join(os.environ['MPX_RUN']))\nsys.exit(4)\n"
    done = shell.mpx("-O", "O0", shell.script("removes.py", text))
    assert done.returncode == 4
    assert "Traceback" not in done.text


def test_a_report_can_be_shown_again(shell, touching):
    first = shell.mpx("-O", "O0", touching)
    again = shell.run([sys.executable, "-m", "mpx", "report"])
    assert again.stdout == first.stderr
