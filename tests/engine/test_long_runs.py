"""A run of any length: what is kept of it, in memory and on disk, does not grow with it."""

import os
from pathlib import Path

import pytest
import torch

from mpx.engine.arrivals import Arrivals
from mpx.engine.scales import Scales
from mpx.monitors import Losses, Overflows, Pass, PeakMemory, Progress, Seen, Step, Throughput
from mpx.presets import resolve
from mpx.record import RunDirectory

MIB = 1024 * 1024
STEPS = 10_000_000
SNAPSHOTS = 2_000  # one every five seconds is a run of hours; more of them only take longer to write


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_ten_million_steps_leave_a_record_below_five_megabytes_and_constant_memory(tmp_path):
    policy = resolve("O1", cwd=tmp_path).policy
    points = policy.monitors.history_points
    scales = Scales(policy.loss_scale, points, Arrivals())
    run = RunDirectory.create(None, cwd=tmp_path, target_name="long.py", level="O1")
    shard = run.shard("a")
    shard.write({"event": "start", "process": "a", "pid": os.getpid()})
    monitors = [
        Progress(),
        Losses(points),
        Overflows(
            lambda _: ("layer", "layer.weight"),
            lambda event, **fields: shard.write({"event": event, "process": "a", **fields}),
        ),
        Throughput(points),
        PeakMemory(points, lambda: ("cpu", resident())),
    ]
    clean = Seen("long.py:3", 2.0, loss_finite=True, number=1.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    bad = Seen("long.py:3", 2.0, loss_finite=True, number=1.0, overflowed=(parameter,))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    applied, skipped = Step(skipped=False), Step(skipped=True)
    scales.enter("long.py:3", torch.tensor(1.0))
    memory, largest = [], 0
    for number in range(1, STEPS + 1):
        overflowed = number % 1000 == 0
        one = Pass(number, number - 1, bad if overflowed else clean, "backward_inf" if overflowed else None)
        if overflowed:
            scales.judge("long.py:3", finite=False, backward=number)
        for monitor in monitors:
            monitor.passed(one)
            if overflowed:
                monitor.went_wrong(one)
            monitor.asked_to_step(optimizer)
            monitor.stepped(skipped if overflowed else applied)
        if number % (STEPS // SNAPSHOTS) == 0:
            summary = {"scalers": scales.snapshot()}
            for monitor in monitors:
                summary.update(monitor.snapshot())
            shard.write({"event": "snapshot", "process": "a", **summary})
            memory.append(resident())
            largest = max(largest, sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file()))
    record = run.record()
    run.write_record(record)
    largest = max(largest, sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file()))
    assert record.steps.attempted == STEPS
    assert record.overflow_counts.backward_inf == STEPS // 1000
    assert largest < 5 * MIB
    settled = SNAPSHOTS // 10
    assert max(memory[settled:]) - memory[settled] < 4 * MIB
