"""Time a training step of the example scripts under plain python and under each level.

A script is run twice, for few and for many steps: the difference of the wall times over the difference
of the steps is the cost of a step, whatever start-up and shut-down cost. The fastest of `--repeat` runs
counts, since noise only ever adds. Start-up is what is left of the short run.

    python scripts/bench_overhead.py --levels O0,O1,O2 --json bench.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
FIXED = {  # nothing but training: no validation inside the timed span, no sample after it
    "train_gpt.py": ["--eval-every", "1000000", "--eval-batches", "1", "--sample", "0"],
    "train_digits.py": [],
}


@dataclass(frozen=True)
class Timing:
    """What one configuration of one script costs."""

    script: str
    level: str
    step_ms: float
    startup_s: float
    ratio: float


def seconds(command: list[str]) -> float:
    """Return the wall time of a command that must succeed."""
    began = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - began
    if finished.returncode:
        sys.exit(f"{' '.join(command)}\nfailed with exit code {finished.returncode}\n{finished.stderr}")
    return elapsed


def prefix(level: str, dtype: str, out: Path) -> list[str]:
    """Return the command up to the script; `plain` is python without mpx."""
    if level == "plain":
        return [sys.executable]
    run = [sys.executable, "-m", "mpx", "run", "--opt-level", level, "--out", str(out), "-qq"]
    return run if level == "O0" else [*run, "--dtype", dtype]


def measure(script: Path, level: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return milliseconds a step and seconds of start-up."""
    best_short = best_long = float("inf")
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as folder:
            short, long = (
                seconds(
                    [
                        *prefix(level, args.dtype, Path(folder, str(steps))),
                        str(script),
                        *("--steps", str(steps), *FIXED.get(script.name, [])),
                    ]
                )
                for steps in (args.short, args.long)
            )
        best_short, best_long = min(best_short, short), min(best_long, long)
    step_s = (best_long - best_short) / (args.long - args.short)
    return step_s * 1000, best_short - args.short * step_s


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a step of the example scripts at each level.")
    parser.add_argument("--script", type=Path, action="append", help="repeatable [both examples]")
    parser.add_argument("--levels", default="O0,O1,O2,O3", help="comma separated; plain is always timed")
    parser.add_argument("--dtype", default="float16", help="of the levels above O0")
    parser.add_argument("--short", type=int, default=10, help="steps of the short run")
    parser.add_argument("--long", type=int, default=60, help="steps of the long run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers and the machine here")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    timings: list[Timing] = []
    print(f"{'script':18} {'level':6} {'ms/step':>9} {'start-up s':>11} {'against plain':>14}")
    for script in args.script or [HERE / name for name in FIXED]:
        plain_ms = 0.0
        for level in ("plain", *args.levels.split(",")):
            step_ms, startup_s = measure(script, level, args)
            plain_ms = plain_ms or step_ms
            timing = Timing(script.name, level, step_ms, startup_s, step_ms / plain_ms)
            timings.append(timing)
            print(
                f"{timing.script:18} {level:6} {step_ms:9.2f} {startup_s:11.2f} {timing.ratio:13.2f}x",
                flush=True,
            )
    if args.json:
        record = {
            "machine": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "dtype": args.dtype,
            "timings": [asdict(timing) for timing in timings],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
