"""Shards: whole lines, bounded size, one writer per process, and never an exception into the run."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.record import ShardWriter
from mpx.record import shards as shards_module
from mpx.record.fold import fold
from mpx.record.shards import read_shard


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "events" / "p.jsonl"


def overflow(number: int) -> dict:
    return {
        "event": "overflow",
        "process": "p",
        "kind": "backward_inf",
        "backward": number,
        "module": "block.0.attn",
    }


def test_nothing_is_made_before_the_first_event(path):
    writer = ShardWriter(path)
    assert not path.parent.exists()
    writer.write({"event": "start", "process": "p"})
    assert [event["event"] for event in read_shard(path)] == ["start"]


def test_every_event_has_a_time(path):
    before = time.time()
    ShardWriter(path).write({"event": "end"})
    ShardWriter(path).write({"event": "end", "t": 3.0})
    first, second = read_shard(path)
    assert before <= first["t"] <= time.time()
    assert second["t"] == 3.0


@given(st.binary(max_size=40))
def test_a_torn_last_line_is_passed_over(tmp_path_factory, rest):
    path = tmp_path_factory.mktemp("torn") / "p.jsonl"
    whole = {"event": "snapshot", "process": "p", "t": 1.0, "forwards": 3}
    line = json.dumps(whole).encode()
    path.write_bytes(line + b"\n" + line[: len(rest) % len(line)])
    assert list(read_shard(path)) == [whole]
    path.write_bytes(line + b"\n" + rest)
    assert next(read_shard(path)) == whole


def test_a_line_after_a_torn_one_is_read(path, monkeypatch):
    """The disk was full for a moment: what came before and after it counts, and the loss is told."""
    clock = [0.0]
    monkeypatch.setattr(shards_module.time, "monotonic", lambda: clock[0])
    write = os.write
    writer = ShardWriter(path)
    writer.write(overflow(1))
    monkeypatch.setattr(shards_module.os, "write", lambda fd, data: write(fd, data[:20]))
    writer.write(overflow(2))
    monkeypatch.setattr(shards_module.os, "write", write)
    writer.write(overflow(3))  # too early: the writer is still silent
    clock[0] += 31.0
    writer.write(overflow(4))
    kept = list(read_shard(path))
    assert [event.get("backward") for event in kept] == [1, 4, None]
    assert kept[2]["event"] == "fault"
    assert "part of a line" in kept[2]["text"]


def test_a_hundred_thousand_events_stay_bounded_and_fold_as_if_none_were_dropped(path):
    writer = ShardWriter(path)
    events = [{"event": "start", "process": "p", "t": 0.0, "pid": 1}]
    for number in range(100_000):
        event = overflow(number) if number % 50 else {"event": "snapshot", "process": "p", "forwards": number}
        events.append({**event, "t": float(number)})
    largest = 0
    for number, event in enumerate(events):
        writer.write(event)
        if number % 997 == 0:
            largest = max(largest, path.stat().st_size)
    assert writer.fault is None
    assert largest < 300 * 1024
    assert fold(read_shard(path)) == fold(events)


def test_a_snapshot_larger_than_the_limit_does_not_compact_at_every_write(path, monkeypatch):
    compactions = []
    writer = ShardWriter(path, compact_above_bytes=1000)
    compact = writer._compact
    monkeypatch.setattr(writer, "_compact", lambda: (compactions.append(1), compact()))
    for number in range(100):
        writer.write({"event": "snapshot", "process": "p", "forwards": number, "casts": {"x": "y" * 3000}})
    assert len(compactions) <= 60  # every second write: the file may hold one old snapshot beside the new one
    assert path.stat().st_size < 10_000


def test_a_reader_meets_whole_files_while_the_writer_compacts(path):
    writer = ShardWriter(path, compact_above_bytes=2000)
    writer.write({"event": "start", "process": "p"})
    for number in range(300):
        writer.write({"event": "snapshot", "process": "p", "forwards": number})
        seen = list(read_shard(path))
        assert seen[0]["event"] == "start"
        assert seen[-1]["forwards"] == number
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_threads_do_not_mix_their_lines(path):
    writer = ShardWriter(path, compact_above_bytes=10_000_000)
    threads = [
        threading.Thread(target=lambda: [writer.write({"event": "x", "text": "y" * 500}) for _ in range(100)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 800


def test_a_write_from_within_a_write_is_not_lost(path, monkeypatch):
    """A signal handler of the script's may run between any two steps of the writer."""
    writer = ShardWriter(path)
    append = writer._append

    def interrupted(line):
        monkeypatch.setattr(writer, "_append", append)
        writer.write(overflow(2))
        return append(line)

    monkeypatch.setattr(writer, "_append", interrupted)
    writer.write(overflow(1))
    assert [event["backward"] for event in read_shard(path)] == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_the_copy_in_a_forked_child_is_mute(path, monkeypatch):
    writer = ShardWriter(path)
    writer.write(overflow(1))
    monkeypatch.setattr(os, "getpid", lambda: writer.pid + 1)
    writer.write(overflow(2))
    monkeypatch.undo()
    assert [event["backward"] for event in read_shard(path)] == [1]


def test_a_script_that_changes_its_directory_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = ShardWriter(Path("p.jsonl"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writer.write(overflow(1))
    assert (tmp_path / "p.jsonl").exists()


def test_a_disk_that_refuses_costs_one_line_and_no_exception(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    writer = ShardWriter(tmp_path / "file" / "p.jsonl")
    for number in range(3):
        writer.write(overflow(number))
    assert "cannot write" in writer.fault
    error = capsys.readouterr().err
    assert error.startswith("mpx: cannot write")
    assert error.count("\n") == 1


def test_an_event_without_a_json_form_is_told_and_costs_no_exception(path):
    class Hostile:
        def __str__(self):
            raise RuntimeError("no text")

    circular: dict = {"event": "snapshot"}
    circular["self"] = circular
    writer = ShardWriter(path)
    for event in ({"event": "overflow", "value": Hostile()}, circular):
        writer.write(event)
    assert [(event["event"], event["where"]) for event in read_shard(path)] == [("fault", "record")] * 2
    assert writer.fault is None


def test_a_shard_that_is_gone_reads_as_empty(tmp_path):
    assert list(read_shard(tmp_path / "none.jsonl")) == []
