"""Ranks in the record: a row each, scales that parted, places that overflowed, nodes put together."""

import json

import pytest

from mpx.errors import RecordError
from mpx.record import RunDirectory
from mpx.record.combine import combine
from mpx.record.fold import RECORDED, fold
from mpx.report import with_findings

SITE = "train.py:7"


def rank(number, *, history, passes=10, shared=10, restart=0, overflows=(), **more):
    process = f"{number}-{restart}"
    scaler = {"site": SITE, "final": history[-1][1], "min": 1.0, "max": 2.0**16, "init": 2.0**16}
    facts = {"rank": number, "restart": restart, "pid": 100 + number, "host": "a", "t": 0.0}
    yield {"event": "start", "process": process, **facts}
    for place in overflows:
        yield {"event": "overflow", "process": process, "kind": "backward_inf", "module": place, "t": 1.0}
    yield {
        "event": "snapshot",
        "process": process,
        "t": 2.0,
        "backwards": passes,
        "steps": {"attempted": passes, "applied": passes, "skipped": 0},
        "scalers": [{**scaler, "history": history}],
        "losses": [{"site": SITE, "backward": [1], "value": [float(number)]}],
        "throughput": {"steps_per_s": 1.0, "step_ms": {"median": 10.0 * (1 + number), "p95": 50.0}},
        "shared_passes": shared,
        **more,
    }


def found(*ranks):
    return with_findings(fold(event for one in ranks for event in one))


def ids(record):
    return {finding.id for finding in record.findings}


def test_ranks_with_one_history_agree():
    record = found(rank(0, history=[[0, 8.0], [5, 4.0]]), rank(1, history=[[0, 8.0], [5, 4.0]]))
    assert record.desyncs == []
    assert [row.rank for row in record.ranks] == [0, 1]
    assert record.losses[0].value == [0.0]  # the run's numbers are those of rank 0


def test_scales_that_part_are_found_at_the_first_pass_that_shows_it():
    record = found(rank(0, history=[[0, 8.0], [5, 4.0], [7, 2.0]]), rank(1, history=[[0, 8.0], [5, 2.0]]))
    (one,) = record.desyncs
    assert (one.site, one.backward, one.scales) == (SITE, 5, {"0": 4.0, "1": 2.0})
    (finding,) = (item for item in record.findings if item.id == "scale_desync")
    assert finding.severity == "error"
    assert "pass 5" in finding.text


def test_last_scales_that_differ_are_found_after_as_many_passes():
    parted = found(rank(0, history=[[0, 8.0]]), rank(1, history=[[0, 8.0], [5, 4.0]]))
    assert "scale_desync" in ids(parted)
    killed_earlier = found(rank(0, history=[[0, 8.0]], passes=3), rank(1, history=[[0, 8.0], [5, 4.0]]))
    assert "scale_desync" not in ids(killed_earlier)


def test_ranks_that_train_for_themselves_may_differ():
    assert found(rank(0, history=[[0, 8.0]], shared=0), rank(1, history=[[0, 4.0]], shared=0)).desyncs == []


def test_attempts_are_compared_each_by_itself_and_told():
    record = found(
        rank(0, history=[[0, 8.0]]),
        rank(1, history=[[0, 8.0]]),
        rank(0, history=[[0, 4.0]], restart=1),
        rank(1, history=[[0, 4.0]], restart=1),
    )
    assert record.desyncs == []
    assert [(row.attempt, row.rank) for row in record.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "restarted" in ids(record)


def test_a_place_that_overflows_is_named_with_its_ranks():
    scale = [[0, 8.0]]
    record = found(
        rank(0, history=scale),
        rank(1, history=scale, overflows=["head"]),
        rank(2, history=scale, overflows=["head"]),
    )
    assert record.overflowing == {"head": [1, 2]}


def test_the_rank_that_its_launcher_saw_fail_is_named_and_no_other():
    failure = {
        "event": "failure",
        "process": "torchrun",
        "host": "a",
        "pid": 101,
        "signal": "SIGKILL",
        "t": 3.0,
    }
    record = found(rank(0, history=[[0, 8.0]]), rank(1, history=[[0, 8.0]]), [failure])
    (finding,) = (item for item in record.findings if item.id == "rank-died")
    assert "rank 1 (pid 101 on a) was killed by SIGKILL, with 10 steps recorded" in finding.text


def test_the_slowest_rank_is_named():
    record = found(*(rank(number, history=[[0, 8.0]]) for number in range(3)))
    (finding,) = (item for item in record.findings if item.id == "straggler")
    assert "rank 2" in finding.text


def test_the_record_of_many_ranks_is_bounded_and_keeps_what_is_the_runs_own():
    many = [rank(number, history=[[0, 8.0]], overflows=["head"] * 200) for number in range(20)]
    record = found(*many)
    assert sum(item.rank == 0 for item in record.overflows) == 200
    assert len(record.overflows) <= RECORDED + 200
    assert record.overflowing == {"head": list(range(20))}


def node(path, ranks, *, level="O1", status="completed"):
    run = RunDirectory.create(path, cwd=path.parent, target_name="train", level=level)
    run.write_preset({"name": level}, {})
    supervisor = run.shard("supervisor")
    supervisor.write({"event": "run", "preset": {"name": level}, "script": "train.py"})
    supervisor.write({"event": "exit", "status": status, "exit_code": int(status == "failed"), "wall_s": 1.0})
    for number in ranks:
        shard = run.shard(f"rank-{number}")
        for event in rank(number, history=[[0, 8.0]]):
            shard.write(event)
    return run


def test_nodes_put_together_are_one_run_that_ended_as_the_worst_of_them(tmp_path):
    record = combine([node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3], status="failed")])
    assert [row.rank for row in record.ranks] == [0, 1, 2, 3]
    assert (record.status, record.exit_code) == ("failed", 1)
    assert record.backwards == 10
    assert json.loads(record.to_json())["script"] == "train.py"


def test_nodes_at_different_presets_are_no_run(tmp_path):
    with pytest.raises(RecordError):
        combine([node(tmp_path / "a", [0]), node(tmp_path / "b", [1], level="O2")])
