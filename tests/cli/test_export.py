"""`mpx export`: every point of the record arrives, in a form that another tool reads."""

import csv
import io
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpx.cli.export import export
from mpx.record import RunDirectory
from mpx.record.fold import fold
from mpx.record.shards import read_shard
from mpx.report.tensorboard import scalars, write_events

EVENTS = Path(__file__).parent.parent / "golden" / "events"
RUNS = sorted(path.stem for path in EVENTS.glob("*.jsonl"))


def record(name="everything"):
    return fold(read_shard(EVENTS / f"{name}.jsonl"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.create(None, cwd=tmp_path, target_name="train.py", level="O1")
    for event in read_shard(EVENTS / "everything.jsonl"):
        directory.shard(event.get("process", "supervisor")).write(event)
    return directory


def call(*words):
    return CliRunner().invoke(export, words, catch_exceptions=True)


def test_csv_goes_to_stdout_or_into_a_file(run, tmp_path):
    told = call("--to", "csv")
    assert told.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    assert {row["quantity"] for row in rows} >= {"loss", "loss_scale"}
    assert call("--to", "csv", "--output", "out.csv").exit_code == 0
    assert (tmp_path / "out.csv").read_text() == told.stdout


@pytest.mark.parametrize("name", RUNS)
def test_every_point_of_every_series_is_there(name):
    told, points = record(name), list(scalars(record(name)))
    expected = sum(len(curve.value) for curve in told.losses) + sum(
        len(scaler.history) for scaler in told.scalers
    )
    expected += len(told.throughput.history) if told.throughput else 0
    expected += len(told.memory.history) if told.memory else 0
    assert len(points) == expected + len(told.overflows)
    for tag in {point.tag for point in points}:
        times = [point.t for point in points if point.tag == tag]
        assert times == sorted(times)


def test_series_of_several_call_sites_have_names_of_their_own():
    told = record()
    tags = {point.tag for point in scalars(told) if point.tag.startswith("loss/") or point.tag == "loss"}
    assert len(tags) == len([curve for curve in told.losses if curve.value])


def test_without_the_package_it_says_what_to_do(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat", None)
    for name in list(sys.modules):
        if name.startswith("tensorboard."):
            monkeypatch.delitem(sys.modules, name)
    error = call("--to", "tensorboard").exception
    assert error.exit_code == 2
    assert "pip install tensorboard" in error.hint
    assert not (run.path / "tensorboard").exists()


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = record()
    assert write_events(told, tmp_path) == len(list(scalars(told)))
    read = EventAccumulator(str(tmp_path)).Reload()
    points = read.Scalars("mpx/loss")
    assert [point.step for point in points] == told.losses[0].backward
    assert [point.value for point in points] == pytest.approx(told.losses[0].value, rel=1e-6)
