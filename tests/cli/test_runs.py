"""`mpx runs`: what lies here, and being rid of it without losing what is still needed."""

import os
import platform
import time

import pytest
from click.testing import CliRunner

from mpx.cli.runs import runs
from mpx.cli.watch import watch
from mpx.errors import MpxError
from mpx.record import RunDirectory, find_run
from mpx.record.life import is_going_on

DAY = 86400


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(here, name="train.py", *, days=0.0, ended=True, pid=None, host=None) -> RunDirectory:
    run = RunDirectory.create(None, cwd=here, target_name=name, level="O1")
    run.write_preset({"name": "O1"}, {})
    shard = run.shard("supervisor")
    shard.write({"event": "run", "script": name, "command": ["mpx", "run", name]})
    start = {"process": "a", "pid": pid or os.getpid(), "host": host or platform.node()}
    run.shard("a").write({"event": "start", **start})
    run.shard("a").write(
        {
            "event": "snapshot",
            "process": "a",
            "steps": {"attempted": 12, "applied": 12, "skipped": 0},
            "backwards": 12,
        }
    )
    if ended:
        run.shard("a").write({"event": "end", "process": "a"})
        shard.write({"event": "exit", "exit_code": 0, "status": "completed", "wall_s": 1.0})
    then = time.time() - days * DAY
    os.utime(run.path, (then, then))
    return run


def call(command, *words):
    return CliRunner().invoke(command, words, catch_exceptions=True)


def names(here):
    return {path.name for path in (here / ".mpx" / "runs").iterdir() if not path.is_symlink()}


def test_lists_the_newest_last(here):
    old, new = make(here, "old.py", days=2), make(here, "new.py")
    going = make(here, "going.py", ended=False)
    lines = call(runs, "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", old.path.name, new.path.name, going.path.name]
    assert "exit code 0" in lines[1]
    assert "12" in lines[1].split()
    assert "goes on" in lines[3]
    assert call(runs, "list", "--paths").stdout.splitlines() == [str(run.path) for run in (old, new, going)]


def test_says_so_when_there_are_none(here):
    result = call(runs, "list")
    assert (result.exit_code, result.stdout) == (0, "")


def test_shows_what_a_run_was_and_left(here):
    run = make(here)
    text = call(runs, "show", run.path.name).stdout
    for words in (str(run.path), "mpx run train.py", "O1", "preset.json", "events/supervisor.jsonl"):
        assert words in text


def test_deletes_by_name_and_moves_the_link(here):
    first, second = make(here, "first.py"), make(here, "second.py")
    assert find_run(None, here).path == second.path
    assert call(runs, "rm", second.path.name).exit_code == 0
    assert names(here) == {first.path.name}
    assert find_run(None, here).path == first.path
    assert call(runs, "rm", first.path.name).exit_code == 0
    assert names(here) == set()


def test_deletes_nothing_when_one_name_is_wrong(here):
    run = make(here)
    assert isinstance(call(runs, "rm", run.path.name, "rubbish").exception, MpxError)
    assert names(here) == {run.path.name}


@pytest.mark.parametrize("why", ["goes on", "notes.txt"])
def test_keeps_what_is_still_needed_unless_forced(here, why):
    run = make(here, ended=why != "goes on")
    if why == "notes.txt":
        (run.path / why).write_text("mine")
    refused = call(runs, "rm", run.path.name)
    assert why in refused.exception.message
    assert why in call(runs, "prune", "--keep", "0").stderr
    assert names(here) == {run.path.name}
    assert call(runs, "rm", "--force", run.path.name).exit_code == 0
    assert names(here) == set()


def test_prunes_all_but_the_newest(here):
    made = [make(here, f"{days}.py", days=days) for days in (3, 2, 1)]
    result = call(runs, "prune", "--keep", "1", "--dry-run")
    assert "would delete" in result.stderr
    assert len(names(here)) == 3
    assert call(runs, "prune", "--keep", "1").exit_code == 0
    assert names(here) == {made[2].path.name}


def test_prunes_by_age(here):
    made = [make(here, f"{days}.py", days=days) for days in (30, 6, 1)]
    call(runs, "prune", "--older-than", "1w")
    assert names(here) == {made[1].path.name, made[2].path.name}
    call(runs, "prune", "--older-than", "12h", "--keep", "1")
    assert names(here) == {made[2].path.name}


@pytest.mark.parametrize("words", [[], ["--older-than", "long"]])
def test_prunes_nothing_without_being_told_what(here, words):
    run = make(here, days=1000)
    assert isinstance(call(runs, "prune", *words).exception, MpxError)
    assert names(here) == {run.path.name}


def test_a_run_goes_on_while_a_process_of_it_may_write(here):
    def going(run):
        return is_going_on(run, run.record())

    assert not going(make(here))
    assert going(make(here, ended=False))
    assert not going(make(here, ended=False, pid=2**22 + 1))  # beyond the largest process id
    assert going(make(here, ended=False, pid=2**22 + 1, host="another"))


def test_watching_what_has_ended_ends_at_once(here):
    make(here)
    result = call(watch)
    assert result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first == "mpx  12 steps"
    assert "exit code 0" in last


def test_watching_follows_a_run_to_its_end(here, monkeypatch):
    """The run goes on while the watcher sleeps."""
    run = make(here, ended=False)
    told = iter(
        [
            (
                "a",
                {
                    "event": "snapshot",
                    "process": "a",
                    "steps": {"attempted": 20, "applied": 20},
                    "backwards": 20,
                },
            ),
            ("a", {"event": "end", "process": "a"}),
            ("supervisor", {"event": "exit", "exit_code": 3, "status": "failed", "wall_s": 9.0}),
        ]
    )

    def sleep(_):
        shard, event = next(told)
        run.shard(shard).write(event)

    monkeypatch.setattr("mpx.cli.watch.time.sleep", sleep)
    monkeypatch.setattr("mpx.cli.watch.LOOK_EVERY_S", 0.0)
    lines = call(watch, "--every", "0.1").stdout.splitlines()
    assert lines[0] == "mpx  12 steps"
    assert "exit code 3" in lines[-1]
    assert next(told, None) is None
