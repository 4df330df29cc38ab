"""What mpx costs when many ranks run: files, bytes and the time to merge them, on shards that look like real ones.

    python scripts/simulate_ranks.py --ranks 1024

Each rank gets the shard of a week of training: full histories, 200 overflows. docs/scale.md holds the numbers.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from mpx.record import RunDirectory
from mpx.report import Options, render, with_findings

POINTS, OVERFLOWS, STEPS = 512, 200, 1_000_000
PLACES = [f"blocks.{layer}.mlp" for layer in range(24)]


def snapshot(rank: int) -> dict[str, object]:
    at = [1 + index * (STEPS // POINTS) for index in range(POINTS)]
    series = [[step, 40.0 + rank % 7] for step in at]
    steps = {"attempted": STEPS, "applied": STEPS - OVERFLOWS, "skipped": OVERFLOWS}
    work = [{"op": f"op{n}", "dtype": "float16", "flops": 1e12, "calls": 24} for n in range(12)]
    return {
        "forwards": STEPS,
        "backwards": STEPS,
        "steps": steps,
        "optimizers": [{"name": "AdamW", **steps}],
        "scalers": [
            {
                "site": "train.py:120",
                "final": 32768.0,
                "min": 1024.0,
                "max": 65536.0,
                "init": 65536.0,
                "growths": 190,
                "backoffs": OVERFLOWS,
                "overflows": OVERFLOWS,
                "history": [[step, 2.0 ** (10 + index % 6)] for index, step in enumerate(at)],
            }
        ],
        "losses": [{"site": "train.py:120", "backward": at, "value": [3.0 - 1e-6 * step for step in at]}],
        "overflow_counts": {"loss_nan": 0, "forward_inf": 0, "backward_inf": OVERFLOWS},
        "throughput": {"steps_per_s": 23.0, "step_ms": {"median": 43.1, "p95": 51.0}, "history": series},
        "memory": {"peak_bytes": 60 * 2**30 + rank * 2**20, "device": "cuda", "history": series},
        "coverage": {"half_flops_share": 0.98, "by_op": work},
        "shared_passes": STEPS,
    }


def write(run: RunDirectory, rank: int) -> None:
    process = f"node{rank // 8:03d}-{rank}-{4000 + rank % 8}"
    shard = run.shard(process)
    facts = {"pid": 4000 + rank % 8, "host": f"node{rank // 8:03d}", "rank": rank, "world_size": 1024}
    events = [{"event": "start", "t": 0.0, "process": process, "torch": "2.13.0", **facts}]
    events += [
        {
            "event": "overflow",
            "t": 10.0 * number,
            "process": process,
            "kind": "backward_inf",
            "backward": 5000 * number,
            "scale": 65536.0,
            "module": PLACES[(rank + number) % len(PLACES)],
            "site": "train.py:120",
        }
        for number in range(OVERFLOWS)
    ]
    events += [{"event": "snapshot", "t": 6e5, "process": process, **snapshot(rank)}]
    events += [{"event": "end", "t": 6e5, "process": process}]
    for event in events:
        shard.write(event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder) / "run", cwd=Path(folder), target_name="train", level="O1")
        for rank in range(ranks):
            write(run, rank)
        sizes = [path.stat().st_size for path in (run.path / "events").iterdir()]
        print(
            f"{ranks} ranks: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB, {max(sizes) / 2**10:.0f} KiB each"
        )
        begun = time.process_time()  # of this process: the machine may be shared
        record = with_findings(run.record())
        merged = time.process_time()
        run.write_record(record)
        text = render(record, Options(run_path=run.path, verbosity=1))
        done = time.process_time()
        size = (run.path / "run.json").stat().st_size / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"merged in {merged - begun:.1f} s; run.json of {size:.1f} MiB and the report in {done - merged:.1f} s"
        )
        print(
            f"{len(record.ranks)} ranks in the record, {len(text.splitlines())} lines of report, {peak:.0f} MiB at most"
        )


if __name__ == "__main__":
    main()
