"""Find the half kernels of a device that are slower than their FP32 ones, and those that do not exist.

Each op of `sweep_cases.py` is called as plain PyTorch calls it, in FP32, float16 and bfloat16, which take turns in one
process (A B C A B C ...): the forward alone, then the gradient of its inputs and that of its weights, each in a graph
that needs nothing else. A figure is the best time of all rounds; on one CPU thread it is the time of the process, so a
busy neighbour hardly shows. A cell is half time over FP32 time, `forward+backward` that of the sums. What exceeds
`--ratio` is printed as lines for `configs/ops/slow_kernels.yaml`, whose `direction` is where the op is slow.

    python scripts/sweep_kernels.py --threads 1 --json sweep.json
    python scripts/sweep_kernels.py --device cuda --ops linear,conv2d,scaled_dot_product_attention
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sweep_cases import CASES, Case, Index

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HALF = ("float16", "bfloat16")
TOTAL = "forward+backward"
TURN = 0.02  # seconds that a type is measured at a time: the fast one needs many calls to find a quiet moment
# What half arithmetic may need of a CPU, oldest first. A line names the first that is missing: a guess to look at.
NEEDS = {
    "float16": ("avx512_fp16", "amx_fp16"),
    "bfloat16": ("avx512_bw", "avx512_bf16", "amx_bf16"),
    "both": ("avx512_bw", "avx512_fp16", "avx512_bf16", "amx_fp16", "amx_bf16"),
}


def prepare(case: Case, name: str, dtype: str, device: str) -> Callable[[], Any]:
    """Return what runs one pass of a case; values are uniform from 0 to 1, so that logarithms and roots are finite."""
    torch.manual_seed(0)
    shapes = [*case.inputs, *case.weights]
    tensors = [
        torch.randint(one.high, one.shape, device=device)
        if isinstance(one, Index)
        else torch.rand(one, device=device).to(DTYPES[dtype])
        for one in shapes
    ]
    first = len(case.inputs) if name == "weight_gradient" else 0
    last = len(case.inputs) if name == "input_gradient" else len(tensors)
    wanted = [value.requires_grad_() for value in tensors[first:last] if value.is_floating_point()]
    if name == "forward":
        return lambda: case.call(*tensors)
    out = case.call(*tensors)
    grad = torch.rand_like(out)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def seconds(run: Callable[[], Any], calls: int, args: argparse.Namespace) -> float:
    """Return the mean time of a call; where one CPU thread does all of it, the time that this process was given."""
    alone = args.device == "cpu" and args.threads == 1
    clock = time.process_time if alone else time.perf_counter
    begun = clock()
    for _ in range(calls):
        run()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return (clock() - begun) / calls


def measure(case: Case, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time one pass in each type by turns; milliseconds by type, or why a half type cannot do it."""
    runs, calls, raises = {}, {}, {}
    for dtype in DTYPES:
        try:
            runs[dtype] = prepare(case, name, dtype, args.device)
            seconds(runs[dtype], 1, args)  # builds what the library caches for these shapes
        except RuntimeError as error:  # NotImplementedError is one
            if dtype == "float32":
                raise
            runs.pop(dtype, None)
            raises[dtype] = str(error).strip().splitlines()[0]
            continue
        calls[dtype] = max(1, min(100, int(1e-3 / seconds(runs[dtype], 1, args))))
    times: dict[str, list[float]] = {dtype: [] for dtype in runs}
    end = time.perf_counter() + args.seconds
    rounds = 0
    while rounds < args.rounds or time.perf_counter() < end:
        rounds += 1
        for dtype, run in runs.items():
            turn = time.perf_counter() + TURN
            while True:
                times[dtype].append(1e3 * seconds(run, calls[dtype], args))
                if time.perf_counter() > turn:
                    break
    return {
        "case": case.label,
        "op": case.op,
        "pass": name,
        "best_ms": {dtype: min(found) for dtype, found in times.items()},
        "median_ms": {dtype: statistics.median(found) for dtype, found in times.items()},
        "raises": raises,
    }


def measured(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the passes of a case, then their sum, each with its ratios."""
    rows = []
    for name in case.passes:
        rows.append(measure(case, name, args))
        yield with_ratio(rows[-1])
    raises = {dtype: why for row in rows for dtype, why in row["raises"].items()}
    total = {"case": case.label, "op": case.op, "pass": TOTAL, "raises": raises}
    for key in ("best_ms", "median_ms"):
        total[key] = {dtype: sum(row[key][dtype] for row in rows) for dtype in DTYPES if dtype not in raises}
    yield with_ratio(total)


def with_ratio(row: dict[str, Any]) -> dict[str, Any]:
    best = row["best_ms"]
    row["ratio"] = {dtype: best[dtype] / best["float32"] for dtype in HALF if dtype in best}
    return row


def lines(rows: list[dict[str, Any]], args: argparse.Namespace, has: list[str]) -> Iterator[str]:
    """Yield the lines for `slow_kernels.yaml`: one for an op, from all its cases and the half types that are slow.

    `ratio` is that of the slowest pass; where both types are slow, of the type that is less so.
    """
    passes = [row for row in rows if row["pass"] != TOTAL]
    for op in dict.fromkeys(row["op"] for row in passes):
        slow = {
            dtype: [row for row in passes if row["op"] == op and row["ratio"].get(dtype, 0) > args.ratio]
            for dtype in HALF
        }
        dtypes = [dtype for dtype in HALF if slow[dtype]]
        if not dtypes:
            continue
        facts = {
            "direction": direction({row["pass"] for dtype in dtypes for row in slow[dtype]}),
            "device": args.device,
        }
        if len(dtypes) == 1:
            facts["dtype"] = dtypes[0]
        needed = NEEDS["both" if len(dtypes) > 1 else dtypes[0]] if args.device == "cpu" else ()
        missing = [name for name in needed if name not in has]
        if missing:
            facts["without"] = missing[0]
        ratio = min(max(row["ratio"][dtype] for row in slow[dtype]) for dtype in dtypes)
        facts["ratio"] = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"
        written = "{" + ", ".join(f"{key}: {value}" for key, value in facts.items()) + "}"
        for name in (op, *(name for case in CASES if case.op == op for name in case.also)):
            yield f"  aten::{name}: {written}"


def direction(passes: set[str]) -> str:
    """Return the direction that a line knows for a set of slow passes."""
    if passes == {"weight_gradient"}:
        return "weight_gradient"
    return "all" if "forward" in passes else "backward"


def capabilities(device: str) -> list[str]:
    """Return the instruction sets of the CPU, or name and compute capability of the GPU."""
    if device == "cuda":
        return [torch.cuda.get_device_name(), "sm_{}{}".format(*torch.cuda.get_device_capability())]
    return sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)


def cell(row: dict[str, Any], dtype: str, slow: float) -> str:
    if dtype in row["raises"]:
        return "raises  "
    return f"{row['ratio'][dtype]:.2f} {'*' if row['ratio'][dtype] > slow else ' '}"


def main() -> None:
    """Measure the chosen ops, print their ratios and the lines that they give."""
    names = list(dict.fromkeys(case.op for case in CASES))
    parser = argparse.ArgumentParser(description="Ratios of half kernels' times to those of FP32 kernels.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ops", default=",".join(names), help="comma-separated (default: all)")
    parser.add_argument("--ratio", type=float, default=2.0, help="what is slow (default: 2.0)")
    parser.add_argument("--rounds", type=int, default=5, help="least number of rounds a pass (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time a pass (default: 1.0)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = args.ops.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"not in the table: {', '.join(unknown)}. Expected some of: {', '.join(names)}")
    torch.set_num_threads(args.threads)
    has = capabilities(args.device)
    print(f"torch {torch.__version__} on {args.device}, threads: {args.threads}")
    print(f"capabilities: {', '.join(has)}\n")
    print(f"{'op':38}{'pass':18}{'FP32 ms':>10}{'float16 / FP32':>18}{'bfloat16 / FP32':>18}")
    rows = []
    for case in CASES:
        for row in measured(case, args) if case.op in chosen else ():
            rows.append(row)
            ratios = "".join(f"{cell(row, dtype, args.ratio):>18}" for dtype in HALF)
            print(f"{case.label:38}{row['pass']:18}{row['best_ms']['float32']:10.3f}{ratios}", flush=True)
    to_paste = list(lines(rows, args, has))
    raised = [
        f"  # {row['case']}, {row['pass']}, {dtype}: {why}"
        for row in rows
        if row["pass"] != TOTAL
        for dtype, why in row["raises"].items()
    ]
    print(f"\nmore than {args.ratio} times as slow as FP32, as configs/ops/slow_kernels.yaml has it:")
    print("\n".join(to_paste) or "  # none")
    print("\nno half kernel, of which configs/ops/no_half_kernel.yaml has a list:")
    print("\n".join(raised) or "  # none")
    if args.json:
        about = {
            "torch": torch.__version__,
            "device": args.device,
            "threads": args.threads,
            "ratio": args.ratio,
        }
        result = {**about, "capabilities": has, "rows": rows, "lines": to_paste}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
