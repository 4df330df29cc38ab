"""Run directories: never overwritten, always found again, read back without the processes that wrote them."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from mpx.errors import RecordError
from mpx.record import RunDirectory, find_run
from mpx.record.fold import fold
from mpx.record.life import strangers


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / ".git").mkdir()  # the search for runs stops here, whatever lies above the temporary folder
    return tmp_path


def create(here, **options):
    return RunDirectory.create(
        options.pop("out", None), cwd=here, target_name="train.py", level="O1", **options
    )


def test_a_run_gets_a_directory_of_its_own_that_git_ignores(here):
    first, second = create(here), create(here)
    assert first.path != second.path
    assert re.fullmatch(r"\d{8}T\d{6}Z-train-O1-[0-9a-f]{4}", first.path.name)
    assert (here / ".mpx" / ".gitignore").read_text() == "*\n"
    assert (here / ".mpx" / "runs" / "latest").resolve() == second.path
    assert first.notice is None


@pytest.mark.parametrize("name", ["pkg.train", "my script.py", "../../x", "", "-", "é.py", "a" * 300])
def test_any_target_name_makes_a_directory_name(here, name):
    path = RunDirectory.create(None, cwd=here, target_name=name, level="team/O1.yaml").path
    assert path.parent == here / ".mpx" / "runs"


def test_a_named_directory_may_be_new_or_empty(here):
    (here / "empty").mkdir()
    assert create(here, out=Path("empty")).path == here / "empty"
    assert create(here, out=Path("new/deep")).path == here / "new" / "deep"
    assert not (here / ".mpx").exists()


def test_a_named_directory_with_something_in_it_is_refused(here):
    (here / "used").mkdir()
    (here / "used" / "model.pt").write_text("")
    with pytest.raises(RecordError, match="is not empty"):
        create(here, out=Path("used"))
    assert [path.name for path in (here / "used").iterdir()] == ["model.pt"]


def test_a_named_directory_that_cannot_be_written_is_refused(here):
    (here / "file").write_text("")
    for out in ("file", "file/below"):
        with pytest.raises(RecordError, match="cannot be written") as caught:
            create(here, out=Path(out))
        assert "--out" in caught.value.hint


def test_where_nothing_can_be_written_the_temporary_folder_serves_and_the_user_is_told(here, monkeypatch):
    (here / ".mpx").write_text("a file in the way, for a folder that is read-only")
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    run = create(here)
    assert run.path.parent == here
    assert str(run.path) in run.notice
    run.shard("p").write({"event": "end", "process": "p"})
    assert len(run.record().processes) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_noticed(here):
    here.chmod(0o555)
    try:
        assert create(here).notice
    finally:
        here.chmod(0o755)


def test_ranks_without_a_supervisor_share_a_directory(here):
    runs = [RunDirectory.join("job-7", cwd=here, target_name="train.py", level="O1") for _ in range(2)]
    assert runs[0].path == runs[1].path
    assert find_run(None, here).path == runs[0].path


def test_the_preset_comes_back(here):
    run = create(here)
    run.write_preset({"name": "O1", "loss_scale": {"init": 65536.0}}, {"name": "configs/O1.yaml:1"})
    expected = ({"name": "O1", "loss_scale": {"init": 65536.0}}, {"name": "configs/O1.yaml:1"})
    assert RunDirectory.open(run.path).read_preset() == expected


def test_the_groups_of_operations_come_back(here):
    run = create(here)
    run.write_op_groups({"matmul": {"ops": {"aten::mm": None}}})
    assert RunDirectory.open(run.path).read_op_groups() == {"matmul": {"ops": {"aten::mm": None}}}


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"half": 5}', '{"half": {}}'])
def test_groups_that_are_not_there_are_left_to_who_asks(here, text):
    """They can be read where the command has read them: a run of an older mpx has none."""
    run = create(here)
    if text is not None:
        (run.path / "ops.json").write_text(text)
    assert run.read_op_groups() == {}


def test_what_a_run_writes_is_no_stranger_to_it(here):
    run = create(here)
    run.write_preset({"name": "O2"}, {})
    run.write_op_groups({})
    run.shard("a").write({"event": "snapshot"})
    run.write_record(run.record())
    (run.path / "mine.txt").touch()
    assert strangers(run) == ["mine.txt"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"preset": 3}', "{"])
def test_a_damaged_preset_is_told(here, text):
    run = create(here)
    (run.path / "preset.json").write_text(text)
    with pytest.raises(RecordError, match="damaged"):
        run.read_preset()


def test_the_record_is_rebuilt_from_what_the_processes_left(here):
    run = create(here)
    run.write_preset({"name": "O2"}, {})
    run.shard("a").write({"event": "snapshot", "process": "a", "forwards": 3})
    run.shard("b").write({"event": "snapshot", "process": "b", "forwards": 4})
    assert not (run.path / "run.json").exists()
    record = RunDirectory.open(run.path).record()
    assert (record.forwards, record.preset) == (7, {"name": "O2"})
    run.write_record(record)
    assert json.loads((run.path / "run.json").read_text()) == record.to_dict()
    assert run.record() == record


def test_the_record_alone_is_enough(here):
    run = create(here)
    run.write_record(fold([{"event": "snapshot", "process": "a", "forwards": 3}]))
    (run.path / "events").rmdir()
    assert find_run(run.path / "run.json", here).record().forwards == 3


def test_shards_of_different_processes_have_different_files(here):
    run = create(here)
    assert run.shard("host-1").path != run.shard("host-2").path
    assert run.shard("../../../etc/x").path.parent == run.path / "events"


def test_the_latest_run_is_found_from_below(here):
    run = create(here)
    deep = here / "a" / "b"
    deep.mkdir(parents=True)
    assert find_run(None, deep).path == run.path


def test_without_the_link_the_newest_run_is_the_latest(here):
    old, new = create(here), create(here)
    os.utime(old.path, (1, 1))
    (here / ".mpx" / "runs" / "latest").unlink()
    assert find_run(None, here).path == new.path


def test_a_run_is_found_by_its_path_by_its_parent_and_by_a_part_of_its_name(here):
    run = create(here)
    create(here)
    names = [run.path, str(run.path), run.path.name, run.path.name[-4:], os.path.relpath(run.path, here)]
    assert {find_run(name, here).path for name in names} == {run.path}
    other = create(here)
    assert {
        find_run(name, here).path for name in ["latest", ".mpx", ".mpx/runs", ".mpx/runs/latest", "."]
    } == {other.path}


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (None, "no run found", "mpx run --opt-level O1"),
        ("nothing", "no run `nothing`", "takes the latest"),
        ("folder", "no run at", None),
    ],
)
def test_what_is_no_run_is_told(here, name, message, hint):
    (here / "folder").mkdir()
    with pytest.raises(RecordError) as caught:
        find_run(name, here)
    assert message in caught.value.message
    assert (hint in caught.value.hint) if hint else caught.value.hint is None


def test_a_name_of_several_runs_and_a_slip_are_told(here):
    first, _ = create(here), create(here)
    with pytest.raises(RecordError, match="names 2 runs"):
        find_run(first.path.name[:4], here)
    with pytest.raises(RecordError) as caught:
        find_run(first.path.name[:-6] + "x" + first.path.name[-6:], here)
    assert "did you mean" in caught.value.hint
