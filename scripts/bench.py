"""Measure what mpx costs and gains against plain FP32 and against torch.amp written by hand.

Every figure of the table is a ratio of two processes that ran one after the other with the same threads and the same
seed: the spellings of a workload take turns (A B C A B C ...), each process gives the median of its step times, each
round a ratio, and the median of the rounds is printed with their range. Single absolute times on a shared machine mean
nothing, and those of steps are kept in the JSON only.

    python scripts/bench.py --workloads gpt,cnn --rounds 5 --json bench.json
    python scripts/bench.py --workloads mlp --phases            # where the time of a step goes, in microseconds

Without `--phases` it says at the end how long the command takes to start (`bench_start_up.py`), in milliseconds. The
parts of a step are those of the round with the least sum, each spelling's own: their ratio is not of a pair.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_start_up import print_start_up

WORKLOADS = Path(__file__).parent / "bench_workloads.py"
ALL = ("mlp", "cnn", "gpt", "long_gpt", "lstm", "gru", "cell", "many", "gan", "accumulation")
FEW = 2  # steps
PHASED = 5  # times as many steps as without `--phases`, for a percentile of each part
SLOW_MS = 500  # by hand, half kernels may take a hundred times as long as FP32 ones on a CPU
STEPS = {
    "mlp": 400, "gan": 400, "many": 10, "cnn": 20, "gpt": 40, "long_gpt": 6, "lstm": 30, "gru": 20, "cell": 10,
    "accumulation": 20,
}  # fmt: skip


def spelling(name: str, workload: str, steps: int, out: str) -> list[str]:
    """Return the command of one spelling: `plain`, `float16` and `bfloat16` by hand, or a level such as `O1-bf16`."""
    script = [str(WORKLOADS), workload, "--steps", str(steps)]
    if name == "plain":
        return [sys.executable, *script]
    if name.startswith("hand-"):
        return [sys.executable, *script, "--amp", name.removeprefix("hand-")]
    return [sys.executable, "-m", "mpx", "run", "-qq", "--out", out, "--opt-level", name, *script]


def run(name: str, workload: str, steps: int, threads: int, *options: str) -> dict[str, Any] | None:
    """Run one process and return what it measured.

    None where torch.amp by hand fails, as it does where a device has no half kernel for an op of the workload.
    """
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [*spelling(name, workload, steps, str(Path(folder) / "run")), *options],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode:
        if name.startswith("hand-"):
            return None
        sys.exit(f"{workload} as {name} failed with exit code {finished.returncode}\n{finished.stderr}")
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def measure(name: str, workload: str, steps: int, threads: int) -> dict[str, Any] | None:
    """Return the median step of one process in milliseconds and its peak memory in MiB; None as `run`."""
    figures = run(name, workload, steps, threads)
    if figures is None:
        return None
    return {"step_ms": statistics.median(figures["step_ms"]), "peak_mib": figures["peak_mib"]}


def reference(name: str) -> str:
    """Return the spelling that a level is compared with besides plain: torch.amp by hand of the same half type."""
    return "hand-bfloat16" if "bf16" in name else "hand-float16"


def ratios(rounds: list[dict[str, Any]], name: str, base: str, figure: str) -> dict[str, float] | None:
    """Return median, least and largest ratio over the rounds; None where one of the two failed."""
    if any(one[name] is None or one[base] is None for one in rounds):
        return None
    found = [one[name][figure] / one[base][figure] for one in rounds]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def slow_or_failing(names: list[str], workload: str, threads: int) -> dict[str, dict[str, Any] | None]:
    """Return what a few steps tell of the spellings by hand of which a step takes seconds, or fails."""
    few = {name: measure(name, workload, FEW, threads) for name in names if name.startswith("hand-")}
    return {name: found for name, found in few.items() if found is None or found["step_ms"] > SLOW_MS}


def take_turns(names: list[str], workload: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Run every spelling once a round, all with as many steps, but for those of which a few are enough."""
    steps, enough = STEPS[workload], slow_or_failing(names, workload, threads)
    return [
        {name: enough[name] if name in enough else measure(name, workload, steps, threads) for name in names}
        for _ in range(rounds)
    ]


def print_ratios(names: list[str], levels: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Print a table of ratios as it is measured, and return it with what was measured."""
    result: dict[str, Any] = {"rows": [], "rounds": {}}
    print(f"{'workload':14}{'spelling':15}{'step / plain':>24}{'step / by hand':>24}{'memory / by hand':>24}")
    for workload in args.workloads.split(","):
        rounds = take_turns(names, workload, args.rounds, args.threads)
        for name in names[1:]:
            base = reference(name)
            row: dict[str, Any] = {
                "workload": workload,
                "spelling": name,
                "plain": ratios(rounds, name, "plain", "step_ms"),
            }
            if name in levels and name != "O0":
                row["by_hand"] = ratios(rounds, name, base, "step_ms")
                row["memory"] = ratios(rounds, name, base, "peak_mib")
            result["rows"].append(row)
            print(
                f"{workload:14}{name:15}"
                + "".join(_cell(row.get(key)) for key in ("plain", "by_hand", "memory")),
                flush=True,
            )
        result["rounds"][workload] = rounds
    return result


def print_phases(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the microseconds of each part of a step: of all rounds the one with the least sum."""
    result: dict[str, Any] = {}
    for workload in args.workloads.split(","):
        too_slow = slow_or_failing(names, workload, args.threads)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names if name not in too_slow}
        for _ in range(args.rounds):
            for name, of in found.items():
                figures = run(name, workload, PHASED * STEPS[workload], args.threads, "--phases")
                if figures is not None:
                    of.append(figures["phases_us"])
        least = {name: min(of, key=lambda one: sum(one.values())) for name, of in found.items()}
        result[workload] = least
        phases = [*least["plain"]]
        print(f"{workload:14}" + "".join(f"{phase:>11}" for phase in [*phases, "sum", "of plain"]))
        for name, of in least.items():
            total = sum(of.values())
            cells = "".join(f"{of[phase]:11.0f}" for phase in phases)
            print(f"{name:14}{cells}{total:11.0f}{total / sum(least['plain'].values()):11.2f}", flush=True)
    return result


def main() -> None:
    """Run the processes and print what they say."""
    parser = argparse.ArgumentParser(description="Ratios of step time and memory, measured side by side.")
    parser.add_argument("--workloads", default=",".join(ALL))
    parser.add_argument("--levels", default="O0,O1,O2,O1-bf16,O2-bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--phases",
        action="store_true",
        help="measure instead how many microseconds each part of a step takes",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    levels = args.levels.split(",")
    names = ["plain", *sorted({reference(level) for level in levels if level != "O0"}), *levels]
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
    }
    if args.phases:
        result["phases_us"] = print_phases(names, args)
    else:
        result |= print_ratios(names, levels, args)
        result["start_up_ms"] = print_start_up(args.rounds, args.threads)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def _cell(ratio: dict[str, float] | None) -> str:
    return (
        " " * 24
        if ratio is None
        else f"{ratio['median']:8.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})".rjust(24)
    )


if __name__ == "__main__":
    main()
