"""Tracebacks of the script show the script's frames and torch's, and none of mpx."""

import logging
import sys
import threading
import traceback
from pathlib import Path

import pytest

import mpx
from mpx.launch import own_frames

# A function of mpx that calls back, as a wrapper of a torch function does: the file name makes it one of mpx.
_SOURCE = "def through(f, *args):\n    return f(*args)\n"
_NAME = str(Path(mpx.__file__).parent / "engine" / "wrapper.py")


@pytest.fixture
def through():
    names = {}
    exec(compile(_SOURCE, _NAME, "exec"), names)
    return names["through"]


@pytest.fixture
def hidden():
    undo = own_frames.hide()
    yield
    undo()


def frames(tb):
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(tb)]


def caught(f, *args):
    try:
        f(*args)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test is about
        return error
    return None


def fails(text="the script's own"):
    raise ValueError(text)


def chain(through):
    try:
        through(fails, "first")
    except ValueError:
        through(through, fails, "second")


def test_cut_takes_out_every_frame_of_ours_and_keeps_the_order(through):
    error = caught(lambda: through(through, lambda: through(fails)))
    own_frames.cut(error)
    assert frames(error.__traceback__) == ["caught", "<lambda>", "<lambda>", "fails"]


def test_cut_reaches_causes_contexts_and_groups(through):
    error = caught(chain, through)
    own_frames.cut(error)
    assert frames(error.__traceback__) == ["caught", "chain", "fails"]
    assert frames(error.__context__.__traceback__) == ["chain", "fails"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_cut_reaches_into_groups(through):
    inner = caught(through, fails)
    group = ExceptionGroup("several", [inner])  # noqa: F821 - Python 3.10 has none
    own_frames.cut(group)
    assert frames(inner.__traceback__) == ["caught", "fails"]


def test_a_chain_that_runs_in_a_circle_ends(through):
    one, other = caught(through, fails), caught(through, fails)
    one.__context__, other.__context__ = other, one
    own_frames.cut(one)
    assert frames(other.__traceback__) == ["caught", "fails"]


def test_a_fault_of_ours_alone_keeps_its_frames():
    names = {}
    exec(compile("def breaks():\n    raise KeyError('ours')\n", _NAME, "exec"), names)
    error = caught(names["breaks"])
    tb = error.__traceback__.tb_next  # as in a thread that mpx has started
    error.__traceback__ = tb
    own_frames.cut(error)
    assert frames(error.__traceback__) == ["breaks"]


def test_whoever_formats_a_traceback_sees_the_same(through, hidden, caplog):
    def logged():
        try:
            through(fails)
        except ValueError:
            logging.getLogger("script").exception("it failed")
            return traceback.format_exc()

    text = logged()
    assert "wrapper.py" not in text + caplog.text
    assert "in fails" in text
    assert "in fails" in caplog.text


def test_undo_leaves_no_hook(monkeypatch):
    before = sys.excepthook, threading.excepthook, traceback.TracebackException.__init__
    undo = own_frames.hide()
    during = sys.excepthook, threading.excepthook, traceback.TracebackException.__init__
    undo()
    assert (sys.excepthook, threading.excepthook, traceback.TracebackException.__init__) == before
    assert all(one is not other for one, other in zip(before, during, strict=True))


def test_full_tracebacks_can_be_asked_for(monkeypatch, through):
    monkeypatch.setenv("MPX_TRACEBACK", "full")
    before = sys.excepthook
    undo = own_frames.hide()
    assert sys.excepthook is before
    undo()


HOOK = """
def hook(kind, error, tb):
    print("the script's own hook:", kind.__name__, file=sys.stderr)
    sys.__excepthook__(kind, error, tb)
def thread_hook(args):
    print("the script's own hook:", args.thread.name, file=sys.stderr)
    threading.__excepthook__(args)
sys.excepthook, threading.excepthook = hook, thread_hook
"""
SCRIPT = """
def fails():
    raise ValueError("first")
def chain():
    try:
        CALL
    except ValueError:
        CALL
thread = threading.Thread(target=chain, name="worker")
thread.start()
thread.join()
chain()
"""


@pytest.mark.parametrize("hook", ["", HOOK], ids=["the interpreter", "hooks of the script"])
def test_an_uncaught_error_is_shown_byte_for_byte_as_without_us(shell, hook):
    wrapped = f"exec(compile({_SOURCE!r}, {_NAME!r}, 'exec')); import sys, threading"
    hide = "from mpx.launch import own_frames; own_frames.hide()"
    texts = [
        f"{wrapped}\n{hook}\n{hide}\n{SCRIPT}".replace("CALL", "through(fails)"),
        f"import sys, threading\n{hook}\n\n{SCRIPT}".replace("CALL", "fails()"),
    ]
    ours, plain = (shell.python(shell.script("fails.py", text)) for text in texts)
    assert ours.text.replace("through(fails)", "fails()") == plain.text
    assert (ours.returncode, plain.text.count("in fails")) == (plain.returncode, 4)
