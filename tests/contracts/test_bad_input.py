"""What cannot be done is said before the script starts, with the right exit code, and leaves nothing behind."""

from dataclasses import dataclass
from pathlib import Path

import pytest

PROC = Path("/proc")

# The first line of a script that has started; nothing here needs torch.
FIRST = 'open("started", "w").close()\n'
FILES = {
    "train.py": FIRST,
    "broken.py": FIRST + "x = (\n",
    "op.yaml": "schema: 1\nextends: O1\nops:\n  user_float32: [sofmax]\n",
    "group.yaml": 'schema: 1\nextends: O1\nops:\n  float32: ["@losess"]\n',
    "many.yaml": "schema: 1\nextends: O1\nlos_scale: dynamic\ncollapse:\n  after: often\n",
    "torn.yaml": "schema: 1\nextends: [O1\n",
    "bytes.yaml": b"\xff\xfe\x00",
    "full/file": "",
}


@dataclass(frozen=True)
class Refusal:
    """Words of a command line, its exit code and what its message must hold."""

    words: str
    code: int
    told: tuple[str, ...]


REFUSED = {
    "unknown level": Refusal("-O O4 train.py", 2, ("--opt-level", "`O4`", "`O1`", "`O2-bf16`")),
    "level in the wrong case": Refusal("-O o1 train.py", 2, ("did you mean `O1`?",)),
    "unknown key": Refusal(
        "--set loss_scale.innit=1 train.py", 2, ("loss_scale.innit", "did you mean `loss_scale.init`?")
    ),
    "wrong type": Refusal(
        "--set loss_scale.init=fast train.py", 2, ("loss_scale.init", "a power of two", "Received `fast`")
    ),
    "wrong dtype": Refusal("--dtype float32 train.py", 2, ("`float16` or `bfloat16`", "Received `float32`")),
    "wrong scale": Refusal(
        "--loss-scale maybe train.py", 2, ("--loss-scale", "`dynamic`", "Received `maybe`")
    ),
    "unknown op": Refusal("--fp32-op sofmax train.py", 2, ("`sofmax`", "no op")),
    "unknown op in a preset": Refusal("-O op.yaml train.py", 2, ("`sofmax`", "no op")),
    "unknown half op": Refusal(
        "--half-op aten::softmax.nowhere train.py", 2, ("`aten::softmax.nowhere`", "no op")
    ),
    "unknown group in a preset": Refusal(
        "-O group.yaml train.py", 2, ("group.yaml:4:13", "`@losess`", "did you mean `@losses`?")
    ),
    "all mistakes of a preset": Refusal(
        "-O many.yaml train.py",
        2,
        ("2 problems", "many.yaml:3:1", "many.yaml:5:10", "did you mean `loss_scale`?"),
    ),
    "a preset that is no YAML": Refusal("-O torn.yaml train.py", 2, ("torn.yaml:",)),
    "a preset that is no text": Refusal("-O bytes.yaml train.py", 2, ("bytes.yaml", "not UTF-8")),
    "a preset that is a folder": Refusal("-O full.yaml train.py", 2, ("full.yaml", "folder")),
    "a preset that is not there": Refusal("-O gone.yaml train.py", 2, ("no such file", "`gone.yaml`")),
    "a contradiction": Refusal(
        "-O O1 --dtype bfloat16 --set dtype=float16 train.py", 2, ("dtype", "--dtype", "--set")
    ),
    "missing script": Refusal("-O O1 trian.py", 127, ("`trian.py`", "did you mean `train.py`?")),
    "no script": Refusal("-O O1", 2, ("nothing to run",)),
    "unknown option": Refusal("--opt-levle O1 train.py", 2, ("--opt-levle", "--opt-level")),
    "a run directory below a file": Refusal("--out train.py/run train.py", 2, ("train.py/run", "`--out`")),
    "a run directory that is full": Refusal("--out full train.py", 2, ("not empty", "`--out`")),
    "a run directory where none can be": Refusal("--out /proc/run train.py", 2, ("/proc/run", "`--out`")),
}


@pytest.fixture(scope="session")
def runs(processes, all_of, tmp_path_factory):
    def folder():
        made = tmp_path_factory.mktemp("bad")
        for name, text in FILES.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        (made / "full.yaml").mkdir()
        return made

    def start(words, **environ):
        return processes.start((*processes.command, *words.split()), cwd=folder(), **environ)

    started = {name: start(refused.words) for name, refused in REFUSED.items()}
    started["an op of torch that no list has"] = start("-O O1 --fp32-op torch.sin train.py")
    started["syntax error"] = start("-O O1 broken.py")
    started["loss scaling off"] = start("-O O2 --loss-scale 1 train.py")
    started["bfloat16, loss scaling on"] = start("-O O2 --dtype bfloat16 --loss-scale dynamic train.py")
    return all_of(started)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_message_and_its_code(runs, name):
    refused, run = REFUSED[name], runs[name]
    assert run.returncode == refused.code, run.stderr
    for words in refused.told:
        assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == b""
    assert len(run.stderr.splitlines()) <= 12


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_nothing_and_starts_nothing(runs, name):
    left = {path.relative_to(runs[name].folder).as_posix() for path in runs[name].folder.rglob("*")}
    assert left == {*FILES, "full", "full.yaml"}


def test_a_syntax_error_is_told_by_python_and_the_report_says_that_nothing_ran(runs, processes):
    run = runs["syntax error"]
    plain = processes.start((processes.command[0], "broken.py"), cwd=run.folder).result()
    assert run.returncode == plain.returncode == 1
    assert run.stderr.startswith(plain.stderr)
    assert "SyntaxError" in plain.stderr
    assert not (run.folder / "started").exists()
    assert any("nothing ran in mixed precision" in finding["text"] for finding in run.record["findings"])
    assert (run.record["status"], run.record["forwards"]) == ("failed", 0)


def test_an_op_that_torch_has_is_taken_though_no_list_has_it(runs):
    run = runs["an op of torch that no list has"].succeeded()
    assert run.record["preset"]["ops"]["user_float32"] == ["torch.sin"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("loss scaling off", "float16 without loss scaling"),
        ("bfloat16, loss scaling on", "bfloat16"),
    ],
)
def test_what_is_unwise_is_said_and_done(runs, name, told):
    run = runs[name].succeeded()
    assert (run.folder / "started").exists()
    (notice,) = run.record["notices"]
    assert told in notice
    assert run.stderr.splitlines()[0] == f"mpx: {notice}"


@pytest.mark.skipif(not PROC.is_dir(), reason="needs a folder in which nobody can write, not even root")
def test_where_nothing_can_be_written_the_record_goes_to_the_temporary_folder(processes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('started')\n")
    run = processes.mpx("-O O1", script, cwd=PROC, TMPDIR=str(tmp_path)).result().succeeded()
    (kept,) = tmp_path.glob("mpx-*/run.json")
    assert run.stdout == b"started\n"
    assert str(kept.parent) in run.stderr.splitlines()[0]
