"""However a target ends, a shell sees the same status as without mpx, and there is a report."""

import os
import resource
import signal
import sys

import pytest

MPX = [sys.executable, "-m", "mpx", "run"]

ENDINGS = {
    "return": ("completed", 0, None),
    "exit-3": ("failed", 3, None),
    "exit-text": ("failed", 1, None),
    "exception": ("failed", 1, None),
    "_exit-7": ("failed", 7, None),
    "execv": ("failed", 3, None),
    "SIGINT": ("interrupted", None, "SIGINT"),
    "SIGTERM": ("killed", None, "SIGTERM"),
    "SIGKILL": ("killed", None, "SIGKILL"),
    "SIGABRT": ("killed", None, "SIGABRT"),
    "SIGSEGV": ("killed", None, "SIGSEGV"),
    "SIGRTMIN": ("killed", None, "SIGRTMIN"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_status_is_mirrored_and_recorded(shell, how):
    script = shell.scripts / "end.py"
    plain = shell.python(script, how)
    ours = shell.mpx("-O", "O0", script, how)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.startswith(plain.stderr)
    assert ours.runs[0].name.encode() in ours.stderr[len(plain.stderr) :]
    record = ours.record
    assert (record["status"], record["exit_code"], record["signal"]) == ENDINGS[how]


@pytest.mark.parametrize("how", ENDINGS)
def test_stderr_is_the_scripts_alone_when_asked(shell, how):
    script = shell.scripts / "end.py"
    assert shell.mpx("-qq", "-O", "O0", script, how).stderr == shell.python(script, how).stderr


def test_a_command_keeps_its_status(shell):
    ours = shell.mpx("-O", "O0", "--", "sh", "-c", "echo one; exit 41")
    assert (ours.returncode, ours.stdout, ours.record["exit_code"]) == (41, b"one\n", 41)


def test_only_the_target_dumps_core(shell):
    """Its core is worth having; the one of the process that mirrors it would overwrite it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)

    def dumps(command):
        with shell.popen(
            command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        ) as process:
            _, status = os.waitpid(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == -signal.SIGABRT
        return os.WCOREDUMP(status)

    script = shell.scripts / "end.py"
    if not dumps([sys.executable, script, "SIGABRT"]):
        pytest.skip("no process dumps core here")
    assert dumps([*MPX, "-qq", "-O", "O0", "--", "sh", "-c", "kill -ABRT $$"]) is False


# Says which signals arrive; ends with their number once its standard input is at its end. A handler may interrupt a
# write, so all of them go past the buffers.
COUNTING = """
import os, signal, sys
count = 0
def seen(number, frame):
    global count
    count += 1
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"later\\n"))
signal.signal(getattr(signal, sys.argv[1]), seen)
os.write(1, b"ready\\n")
sys.stdin.read()
os.write(1, f"count {count}\\n".encode())
sys.exit(count)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGINT"])
def test_a_signal_sent_to_mpx_reaches_the_target_once(shell, name):
    script = shell.script("counting.py", COUNTING)
    command = [*MPX, "-qq", "-O", "O0", script, name]
    pipe = {"stdin": -1, "stdout": -1, "bufsize": 0}
    with shell.popen(command, **pipe) as process:
        assert shell.line(process) == b"ready\n"
        for _ in range(2):
            process.send_signal(getattr(signal, name))
            assert shell.line(process) == f"got {name}\n".encode()
        process.stdin.close()
        assert (process.stdout.read(), process.wait()) == (b"count 2\n", 2)


def sent_to_the_group(process, number):
    os.killpg(process.pid, number)


def sent_as_by_timeout(process, number):
    """`timeout -s` tells its child, and then its whole group."""
    process.send_signal(number)
    os.killpg(process.pid, number)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGQUIT"])
@pytest.mark.parametrize("send", [sent_to_the_group, sent_as_by_timeout])
def test_a_signal_sent_to_the_group_reaches_the_target_once(shell, send, name):
    """As CI systems send it, without a terminal; a second one would interrupt the clean-up after the first."""
    script = shell.script("counting.py", COUNTING)
    command = [*MPX, "-qq", "-O", "O0", script, name]
    with shell.popen(command, stdin=-1, stdout=-1, bufsize=0, start_new_session=True) as process:
        assert shell.line(process) == b"ready\n"
        send(process, getattr(signal, name))
        assert shell.line(process) == f"got {name}\n".encode()
        # of two signals that wait the lower number is seen first: when this one arrives, the other was dealt with
        process.send_signal(signal.SIGUSR1)
        assert shell.line(process) == b"later\n"
        process.stdin.close()
        assert (process.stdout.read(), process.wait()) == (b"count 1\n", 1)


def test_a_target_that_a_signal_ends_leaves_a_report(shell):
    script = shell.script("wait.py", "import sys\nprint('ready', flush=True)\nsys.stdin.read()\n")
    with shell.popen([*MPX, "-O", "O0", script], stdin=-1, stdout=-1, bufsize=0, stderr=-1) as process:
        assert shell.line(process) == b"ready\n"
        process.send_signal(signal.SIGTERM)
        process.wait()  # before its input is closed, which would end the script as well
        _, stderr = process.communicate()
        assert process.returncode == -signal.SIGTERM
        (run,) = shell.runs()
        assert run.name.encode() in stderr


def test_ctrl_c_reaches_the_script_once_and_ends_as_under_python(shell, terminal):
    process = terminal([*MPX, "-O", "O0", shell.script("counting.py", COUNTING), "SIGINT"])
    process.read(until=b"ready")
    process.type(b"\x03")
    process.read(until=b"got SIGINT")
    process.type(b"\x04")
    assert b"count 1" in process.read(until=b"count")
    assert process.process.wait() == 1


def test_ctrl_c_interrupts_the_script_and_not_the_report(shell, terminal):
    script = shell.script("wait.py", "import sys\nprint('ready', flush=True)\nsys.stdin.read()\n")
    process = terminal([*MPX, "-O", "O0", script])
    process.read(until=b"ready")
    process.type(b"\x03")
    screen = process.read()
    assert process.process.wait() == -signal.SIGINT
    assert screen.count(b"KeyboardInterrupt") == 1
    (run,) = shell.runs()
    assert run.name.encode() in screen


def test_ctrl_backslash_reaches_the_script_once(shell, terminal):
    process = terminal([*MPX, "-qq", "-O", "O0", shell.script("counting.py", COUNTING), "SIGQUIT"])
    process.read(until=b"ready")
    process.type(b"\x1c")
    process.read(until=b"got SIGQUIT")
    process.type(b"\x04")
    assert b"count 1" in process.read(until=b"count")
    assert process.process.wait() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a child that its parent died")
def test_a_target_does_not_outlive_a_killed_mpx(shell):
    command = [*MPX, "-qq", "-O", "O0", shell.script("counting.py", COUNTING), "SIGTERM"]
    with shell.popen(command, stdin=-1, stdout=-1, bufsize=0) as process:
        assert shell.line(process) == b"ready\n"
        process.kill()
        process.wait()
        process.stdin.close()
        assert process.stdout.read() == b"got SIGTERM\ncount 1\n"


def test_nothing_is_waited_for_but_the_target(shell):
    """A background process that the target leaves behind neither delays the end nor is killed."""
    text = "import subprocess\nprint(subprocess.Popen(['sh', '-c', 'read line']).pid)\n"
    with shell.popen(
        [*MPX, "-qq", "-O", "O0", shell.script("leave.py", text)], stdin=-1, stdout=-1, bufsize=0
    ) as process:
        pid = int(shell.line(process))
        assert process.wait() == 0
        os.kill(pid, 0)
        process.stdin.close()


@pytest.mark.parametrize("how", ["exit-3", "SIGTERM"])
def test_a_reader_of_the_report_that_has_left_changes_nothing(shell, how):
    end, other = os.pipe()
    os.close(end)
    text = f"import os, sys\nsys.stderr = open(os.devnull, 'w')\nexec(open({str(shell.scripts / 'end.py')!r}).read())\n"
    ours = shell.mpx("-O", "O0", shell.script("quiet.py", text), how, stderr=other)
    os.close(other)
    assert ours.returncode == {"exit-3": 3, "SIGTERM": -signal.SIGTERM}[how]
