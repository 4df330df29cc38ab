"""What `mpx run` takes its words for."""

import sys
import zipfile

import pytest

from mpx.errors import LaunchError, UsageError
from mpx.launch.target import Target, detect


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "plain", "lib/train.py", "app/__main__.py", "sh/notes.txt", "pkg/tool.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print()\n")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "print()\n")
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho\n")
    script.chmod(0o755)
    (tmp_path / "closed.sh").write_text("#!/bin/sh\necho\n")
    return tmp_path


def found(*words, module=False, after_dashes=False, as_kind=None):
    return detect(words, module=module, after_dashes=after_dashes, as_kind=as_kind)


def script(name, *words):
    return Target("script", (sys.executable, *words), name)


@pytest.mark.parametrize("after_dashes", [False, True])
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("train.py", "-x"), "train"),
        (("./lib/train.py",), "train"),
        (("app",), "app"),
        (("app/__main__.py",), "app"),
        (("app.zip", "--", "-m"), "app"),
    ],
)
def test_a_file_a_folder_and_a_zip_are_scripts_also_after_dashes(words, name, after_dashes):
    assert found(*words, after_dashes=after_dashes) == script(name, *words)


def test_a_script_needs_no_ending_when_no_dashes_stand_before_it():
    assert found("plain") == script("plain", "plain")
    assert found("-", "x") == script("stdin", "-", "x")


def test_a_word_after_dashes_that_is_no_script_is_looked_up_like_a_shell_does(folder):
    target = found(
        "sh", "-c", "train.py", after_dashes=True
    )  # there is a folder `sh` too, but none that runs
    assert (target.kind, target.name, target.argv[1:]) == ("command", "sh", ("-c", "train.py"))
    assert target.argv[0].endswith("/sh")
    assert found("./train.sh", after_dashes=True) == Target("command", ("./train.sh",), "train.sh")


def test_a_module_is_not_looked_for():
    assert found("no.such", "-m", module=True) == Target(
        "module", (sys.executable, "-m", "no.such", "-m"), "no.such"
    )


def test_as_settles_the_kind(folder):
    assert found("train.sh", as_kind="script") == script("train", "train.sh")
    assert found("train", as_kind="module").argv == (sys.executable, "-m", "train")
    assert found("./train.sh", as_kind="command").argv == ("./train.sh",)
    with pytest.raises(UsageError, match="`-m` contradicts `--as script`"):
        found("train.py", module=True, as_kind="script")


@pytest.mark.parametrize(
    ("words", "options", "code", "message", "hint"),
    [
        ("trian.py", {}, 127, "cannot find the script `trian.py`", "did you mean `train.py`?"),
        ("lib/trin.py", {}, 127, "cannot find the script", "did you mean `lib/train.py`?"),
        ("nowhere/train.py", {}, 127, "cannot find the script", "there is no folder `nowhere`"),
        ("pkg.tool", {}, 127, "cannot find the script `pkg.tool`", "`mpx run -m pkg.tool`"),
        ("env", {}, 127, "cannot find the script `env`", "`mpx run -- env` runs commands"),
        ("qqqq", {}, 127, "cannot find the script `qqqq`", None),
        ("train.sh", {}, 126, "begins with `#!/bin/sh`", "`mpx run -- ./train.sh`"),
        (
            "trian.py",
            {"after_dashes": True},
            127,
            "cannot find the command `trian.py`",
            "did you mean `train.py`?",
        ),
        ("train.sh", {"after_dashes": True}, 127, "cannot find the command", "`mpx run -- ./train.sh`"),
        (
            "./closed.sh",
            {"after_dashes": True},
            126,
            "`./closed.sh` is not executable",
            "`mpx run -- bash ./closed.sh`",
        ),
        ("./lib", {"after_dashes": True}, 126, "`./lib` is a folder without `__main__.py`", None),
    ],
)
def test_what_cannot_run_is_refused_with_a_way_out(words, options, code, message, hint):
    with pytest.raises(LaunchError) as caught:
        found(words, **options)
    assert message in caught.value.message
    assert caught.value.exit_code == code
    assert (caught.value.hint is None) == (hint is None)
    assert hint is None or hint in caught.value.hint


def test_a_binary_is_no_script(folder):
    (folder / "tool").write_bytes(b"\x7fELF\x02\x01\x01\x00")
    with pytest.raises(LaunchError, match="it is a compiled program"):
        found("tool")
