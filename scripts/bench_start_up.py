"""Measure how long `mpx` takes to start, and what `mpx run` adds to a script, which takes turns with plain python.

    python scripts/bench_start_up.py --rounds 8 --json start_up.json

Prints medians over the rounds in milliseconds, with their range. A first round, which may write bytecode, is not
counted.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MPX = [sys.executable, "-m", "mpx"]
CHILDREN = 20
NOTHING, TORCH, TRAINING = "an empty script", "an import of torch", "a short training"
SCRIPTS = {
    NOTHING: "",
    TORCH: "import torch",
    TRAINING: """
import torch

layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(layer.parameters())
for _ in range(10):
    optimizer.zero_grad()
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()
""",
    f"{CHILDREN} children": f"""
import subprocess
import sys

for _ in range({CHILDREN}):
    subprocess.run([sys.executable, "-c", "pass"], check=True)
""",
}


def milliseconds(command: list[str], threads: int) -> float:
    """Return how long a command took."""
    begun = time.perf_counter()
    finished = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    taken = 1000 * (time.perf_counter() - begun)
    if finished.returncode:
        sys.exit(f"{command} failed with exit code {finished.returncode}\n{finished.stderr}")
    return taken


def one_round(folder: Path, threads: int, *, ours_first: bool) -> dict[str, float]:
    """Return what each command took, and what `mpx run` added to each script."""
    found, added = {"mpx --help": milliseconds([*MPX, "--help"], threads)}, {}
    for name, source in SCRIPTS.items():
        script, out = folder / "script.py", folder / "run"
        script.write_text(source)
        pair = {
            "plain": [sys.executable, str(script)],
            "ours": [*MPX, "run", "-qq", "--out", str(out), str(script)],
        }
        order = reversed(pair) if ours_first else pair
        taken = {spelling: milliseconds(pair[spelling], threads) for spelling in order}
        added[name] = taken["ours"] - taken["plain"]
        if name == TRAINING:
            found["mpx report"] = milliseconds([*MPX, "report", str(out)], threads)
            found["python script.py, a short training"] = taken["plain"]
        shutil.rmtree(out)
    of_children = added.pop(f"{CHILDREN} children") - added[NOTHING]
    found |= {f"mpx run adds to {name}": taken for name, taken in added.items()}
    return found | {"mpx run adds to a child without torch": of_children / CHILDREN}


def print_start_up(rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Print and return median, least and largest of each figure, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        found = [one_round(Path(folder), threads, ours_first=bool(n % 2)) for n in range(1 + rounds)][1:]
    result = {}
    for name in found[0]:
        times = [one[name] for one in found]
        ms = result[name] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
        print(f"{name:40}{ms['median']:8.1f} ms ({ms['min']:.1f} to {ms['max']:.1f})")
    return result


def main() -> None:
    """Run the processes and print how long they took."""
    parser = argparse.ArgumentParser(description="Milliseconds until something starts.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = print_start_up(args.rounds, args.threads)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
