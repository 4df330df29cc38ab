"""`--progress`: a line now and then from beside the script, on stderr, and never without being asked."""

WAITS = "import sys, time\nprint('begins', flush=True)\ntime.sleep(0.8)\nprint('ends')\nsys.exit(3)\n"


def test_a_line_every_so_often_and_the_script_is_none_the_wiser(shell):
    script = shell.script("waits.py", WAITS)
    asked = shell.mpx("-O", "O0", "--progress", "0.2", script)
    plain = shell.mpx("-O", "O0", script)
    line = "mpx: torch has not been imported yet"
    assert 1 <= asked.text.splitlines().count(line) <= 8
    assert line not in plain.text
    assert asked.stdout == plain.stdout == b"begins\nends\n"
    assert asked.returncode == plain.returncode == 3


def test_quiet_is_quiet(shell):
    script = shell.script("waits.py", WAITS)
    assert shell.mpx("-O", "O0", "-qq", "--progress", "0.2", script).text == ""


def test_a_signal_is_still_passed_on_between_the_lines(shell):
    code = "import os, signal, sys, time\n"
    code += "signal.signal(signal.SIGUSR1, lambda *_: (print('heard', flush=True), sys.exit(5)))\n"
    code += "time.sleep(0.3)\nos.kill(os.getppid(), signal.SIGUSR1)\ntime.sleep(30)\n"
    result = shell.mpx("-O", "O0", "-qq", "--progress", "0.1", shell.script("hears.py", code))
    assert (result.returncode, result.stdout) == (5, b"heard\n")
