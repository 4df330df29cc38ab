"""The laws of the fold: what order, compaction and damage may not change."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.record.fold import fold
from mpx.record.retention import FAULTS_KEPT, OVERFLOWS_KEPT, retain

KINDS = ["loss_nan", "forward_inf", "backward_inf"]


def start(process, t=0.0, **fields):
    return {"event": "start", "t": t, "process": process, "pid": 1, "torch": "2.13.0", **fields}


def snapshot(process, t=1.0, steps=0, skipped=0, **fields):
    counts = {"attempted": steps, "applied": steps - skipped, "skipped": skipped}
    counted = {"forwards": steps, "backwards": steps, "steps": counts}
    return {"event": "snapshot", "t": t, "process": process, **counted, **fields}


def overflow(process, t=1.0, kind="backward_inf", backward=1, **fields):
    return {"event": "overflow", "t": t, "process": process, "kind": kind, "backward": backward, **fields}


times = st.floats(0, 1e6)
counts = st.integers(0, 1000)


@st.composite
def shards(draw):
    """A few processes, each with the events that one may write, in the order of writing."""
    result = []
    for number in range(draw(st.integers(1, 4))):
        name = f"p{number}"
        events = st.one_of(
            st.builds(snapshot, st.just(name), t=times, steps=counts, nonfinite_losses=counts),
            st.builds(overflow, st.just(name), t=times, kind=st.sampled_from(KINDS), backward=counts),
            st.builds(
                lambda name, where: {
                    "event": "fault",
                    "process": name,
                    "t": 1.0,
                    "where": where,
                    "text": "x",
                },
                st.just(name),
                st.sampled_from("ab"),
            ),
            st.just({"event": "end", "process": name, "t": 5.0}),
            st.just({"event": "of a later version", "process": name}),
        )
        first = start(name, t=draw(times), rank=draw(st.none() | st.integers(0, 2)))
        result.append([first, *draw(st.lists(events, max_size=12))])
    return result


def flat(shards):
    return [event for shard in shards for event in shard]


@given(shards(), st.randoms(use_true_random=False))
def test_the_order_of_the_shards_does_not_matter(shards, generator):
    expected = fold(flat(shards))
    generator.shuffle(shards)
    assert fold(flat(shards)) == expected


@given(shards())
def test_what_the_fold_leaves_out_changes_nothing(shards):
    events = flat(shards)
    kept = retain(events)
    assert fold(kept) == fold(events)
    assert retain(kept) == kept


@given(shards())
def test_what_is_kept_stays_in_the_order_of_writing(shards):
    events = [{**event, "number": number} for number, event in enumerate(flat(shards))]
    numbers = [event["number"] for event in retain(events)]
    assert numbers == sorted(numbers)


def test_overflows_of_several_processes_are_told_in_the_order_of_time():
    events = [overflow("a", t=1.0), overflow("a", t=3.0), overflow("b", t=2.0)]
    assert [item.process for item in fold(events).overflows] == ["a", "b", "a"]


@given(shards(), st.integers(0, 60))
def test_a_shard_may_be_compacted_at_any_moment(shards, cut):
    events = flat(shards)
    assert fold(retain(events[:cut]) + events[cut:]) == fold(events)


@given(shards())
def test_interleaving_processes_does_not_matter(shards):
    """Events of different processes may reach the fold in any mixture; each process's own order is kept."""
    expected = fold(flat(shards))
    generator = random.Random(0)
    queues = [list(shard) for shard in shards]
    mixed = []
    while any(queues):
        mixed.append(generator.choice([queue for queue in queues if queue]).pop(0))
    assert fold(mixed) == expected


KINDS_KNOWN = ["run", "exit", "preset", "start", "snapshot", "overflow", "fault", "end", "skipped"]
FIELDS = ["t", "process", "steps", "scalers", "kind", "rank", "where", "text", "count", "wall_s", "notices"]
FIELDS += ["preset", "origin", "losses", "memory", "coverage", "casts", "device", "exit_code", "status"]
damaged = st.one_of(
    st.none(),
    st.integers(-2, 2),
    st.text(max_size=2),
    st.just([]),
    st.just({}),
    st.floats(),
    st.just([1, {}]),
)
damaged_events = st.dictionaries(st.sampled_from(FIELDS), damaged).flatmap(
    lambda fields: st.sampled_from([*KINDS_KNOWN, None, 3]).map(lambda kind: {"event": kind, **fields})
)


@given(st.lists(damaged_events, max_size=6))
def test_no_event_whatever_its_form_costs_the_report(events):
    fold(events).to_json()


def test_a_misfit_is_told_and_the_rest_of_the_event_counts():
    record = fold([start("p"), snapshot("p", steps=3, scalers="broken")])
    assert record.steps.attempted == 3
    assert [(fault.where, fault.process) for fault in record.faults] == [("record", "p")]
    assert "`scalers` does not fit" in record.faults[0].text


def test_snapshots_are_cumulative_the_last_written_counts():
    record = fold([start("p"), snapshot("p", t=9.0, steps=1), snapshot("p", t=3.0, steps=5, skipped=1)])
    assert (record.steps.attempted, record.steps.applied, record.steps.skipped) == (5, 4, 1)


def test_of_several_ranks_rank_0_counts_and_the_overflows_are_united():
    events = []
    for rank in (1, 0):
        name = f"r{rank}"
        events += [
            start(name, rank=rank, world_size=2),
            overflow(name, t=1.0 + rank, module=f"m{rank}"),
            snapshot(name, steps=10, overflow_counts={"backward_inf": 1}, memory={"peak_bytes": 5 + rank}),
        ]
    record = fold(events)
    assert record.steps.attempted == 10
    assert record.overflow_counts.backward_inf == 1
    assert [(item.module, item.rank) for item in record.overflows] == [("m0", 0), ("m1", 1)]
    assert record.memory.peak_bytes == 6
    assert [(item.rank, item.trained) for item in record.processes] == [(0, True), (1, True)]


def test_restarts_of_a_rank_add_up():
    record = fold(
        [
            start("a", t=0, rank=0, restart=0),
            snapshot("a", steps=3),
            start("b", t=9, rank=0, restart=1),
            snapshot("b", steps=4),
        ]
    )
    assert record.steps.attempted == 7


def test_unrelated_trained_processes_add_up():
    substitution = {"id": "x", "text": "y", "count": 2}
    record = fold(
        [
            event
            for name in "ab"
            for event in [
                start(name),
                snapshot(name, steps=3, substitutions=[substitution], casts={"float16": 5, "note": "n"}),
            ]
        ]
    )
    assert record.steps.attempted == 6
    assert [item.count for item in record.substitutions] == [4]
    assert record.casts == {"float16": 10, "note": "n"}


def test_a_worker_that_only_calls_modules_does_not_count_beside_one_that_trains():
    record = fold([start("w"), {**snapshot("w"), "forwards": 100}, start("p"), snapshot("p", steps=2)])
    assert record.forwards == 2


def test_without_training_the_calls_count():
    record = fold([start("p"), {**snapshot("p"), "forwards": 100}])
    assert record.forwards == 100
    assert [process.trained for process in record.processes] == [False]


def test_shares_of_several_processes_are_weighed_by_their_work():
    def work(name, half, full):
        by_op = [
            {"op": "mm", "dtype": "float16", "flops": half, "calls": 1},
            {"op": "mm", "dtype": "float32", "flops": full, "calls": 1},
        ]
        return snapshot(name, steps=1, coverage={"half_flops_share": half / (half + full), "by_op": by_op})

    record = fold([start("a"), work("a", 90.0, 10.0), start("b"), work("b", 0.0, 100.0)])
    assert record.coverage.half_flops_share == pytest.approx(0.45)
    assert {(item.dtype, item.flops, item.calls) for item in record.coverage.by_op} == {
        ("float16", 90.0, 2),
        ("float32", 110.0, 2),
    }


def test_overflows_that_no_snapshot_saw_count():
    """The process was killed between the overflow and its next snapshot."""
    record = fold(
        [start("p"), snapshot("p", steps=1), overflow("p"), overflow("p"), overflow("p", kind="loss_nan")]
    )
    assert record.overflow_counts.backward_inf == 2
    assert record.overflow_counts.loss_nan == 1
    assert record.nonfinite_losses == 1


def test_overflows_and_faults_are_bounded_and_equal_faults_counted():
    fault = {"event": "fault", "process": "p", "where": "memory"}
    events = [overflow("p", backward=i) for i in range(1000)]
    events += [{**fault, "text": "same"}] * 1000
    events += [{**fault, "text": str(i)} for i in range(1000)]
    record = fold(events)
    assert len(record.overflows) == OVERFLOWS_KEPT
    assert len(record.faults) == FAULTS_KEPT
    assert record.faults[0].count == 1000


def test_the_supervisors_events_fill_the_head():
    run = {
        "event": "run",
        "mpx": "0.1",
        "python": "3.12",
        "command": ["python", "t.py"],
        "script": "t.py",
        "preset": {"name": "O1"},
        "origin": {"name": "--opt-level"},
        "notices": ["n"],
        "started": "2026-01-01T00:00:00Z",
    }
    ending = {
        "event": "exit",
        "t": 8.0,
        "exit_code": None,
        "signal": "SIGKILL",
        "status": "killed",
        "wall_s": 7.5,
    }
    record = fold([run, ending, {"event": "skipped", "text": "python2 cannot import mpx"}])
    assert (record.mpx, record.script, record.preset, record.origin) == (
        "0.1",
        "t.py",
        {"name": "O1"},
        {"name": "--opt-level"},
    )
    assert (record.exit_code, record.signal, record.status, record.wall_s) == (None, "SIGKILL", "killed", 7.5)
    assert record.notices == ["n", "python2 cannot import mpx"]


def test_without_an_ending_the_status_is_unknown():
    assert fold([start("p")]).status == "unknown"
