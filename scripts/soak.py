"""Train a tiny model for a very long time under mpx, and watch that neither the process nor its record grows.

A run of a week takes more steps than any test: what leaks a hundred bytes a step fills a machine there. The loss
overflows now and then, so that the ways of the loss scale are walked as well.

    python scripts/soak.py --steps 200000 --opt-level O2
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1024 * 1024
SETTLED = 0.2  # of the steps: until then caches fill
MOST_GROWTH = (
    8 * MIB
)  # from there to the end: far less than a byte a step is a leak, more may be the allocator's
MOST_RECORD = 5 * MIB


def train(steps: int, overflow_every: int) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for number in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        (loss * 1e6 if number % overflow_every == overflow_every - 1 else loss).backward()
        optimizer.step()


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(args: argparse.Namespace, run: Path) -> list[tuple[int, int, int]]:
    """Run the training and return samples of (steps, resident bytes, bytes of the record)."""
    from mpx.record import RunDirectory

    command = [sys.executable, "-m", "mpx", "run", "-qq", "--out", str(run), "--opt-level", args.opt_level]
    command += [__file__, "--train", "--steps", str(args.steps), "--overflow-every", str(args.overflow_every)]
    samples: list[tuple[int, int, int]] = []
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(args.sample_every)
        if not (run / "events").is_dir():
            continue
        record = RunDirectory.open(run).record()
        if record.processes and (memory := resident(record.processes[0].pid)):
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            samples.append((record.steps.attempted, memory, size))
            print(
                f"{record.steps.attempted:>10,} steps  {memory / MIB:8.1f} MiB resident  {size / 1024:8.1f} KiB record",
                flush=True,
            )
    if process.returncode:
        sys.exit(f"the training failed with exit code {process.returncode}")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--overflow-every", type=int, default=500)
    parser.add_argument("--sample-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.steps, args.overflow_every)
        return
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(args, Path(folder) / "run")
    settled = [sample for sample in samples if sample[0] >= SETTLED * args.steps]
    if len(settled) < 2:
        sys.exit("too few samples: sample more often, or train longer")
    growth, largest = settled[-1][1] - settled[0][1], max(size for *_, size in samples)
    per_step = growth / (settled[-1][0] - settled[0][0] or 1)
    print(
        f"grew by {growth / MIB:.1f} MiB ({per_step:.2f} bytes a step); the record took {largest / 1024:.0f} KiB"
    )
    if growth > MOST_GROWTH or largest > MOST_RECORD:
        sys.exit(
            f"expected at most {MOST_GROWTH / MIB:.0f} MiB and a record below {MOST_RECORD / MIB:.0f} MiB"
        )


if __name__ == "__main__":
    main()
