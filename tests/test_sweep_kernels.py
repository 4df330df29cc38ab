"""`scripts/sweep_kernels.py` prints what `configs/ops/slow_kernels.yaml` can take; no test of it asks for times."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

SCRIPTS = Path(__file__).parent.parent / "scripts"


def test_every_op_of_the_table_is_one_of_the_dispatcher(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from sweep_cases import CASES

    ops = {name for case in CASES for name in (case.op, *case.also)}
    assert [name for name in ops if not torch._C._dispatch_has_kernel(f"aten::{name}")] == []


def test_ops_above_the_ratio_give_lines_and_ops_without_a_half_kernel_are_told(tmp_path):
    python = [sys.executable, "-W", "error", str(SCRIPTS / "sweep_kernels.py")]
    quick = ["--rounds", "1", "--seconds", "0", "--ratio", "0"]  # every kernel is slower than that
    command = [*python, "--ops", "layer_norm,avg_pool3d", "--json", str(tmp_path / "sweep.json"), *quick]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    found = json.loads((tmp_path / "sweep.json").read_text())
    layer_norm = [row for row in found["rows"] if row["case"] == "layer_norm"]
    passes = ["forward", "input_gradient", "weight_gradient", "forward+backward"]
    assert [row["pass"] for row in layer_norm] == passes
    assert all(0 < row["ratio"][half] < math.inf for row in layer_norm for half in ("float16", "bfloat16"))
    assert set(found["capabilities"]) <= set(torch.cpu.get_capabilities())

    table, _, rest = done.stdout.partition("more than 0.0 times")
    for row in found["rows"]:
        assert any(
            line.startswith(f"{row['case']} ") and f" {row['pass']} " in line for line in table.splitlines()
        )
    pasted, _, raised = rest.partition("no half kernel, ")
    lines = yaml.safe_load("\n".join(line for line in pasted.splitlines() if line.startswith("  ")))
    assert list(lines) == ["aten::layer_norm"]
    facts = lines["aten::layer_norm"]
    assert set(facts) - {"without"} == {"direction", "device", "ratio"}  # both half types: no `dtype`
    assert (facts["direction"], facts["device"]) == ("all", "cpu")
    largest = [
        max(row["ratio"][half] for row in found["rows"] if row["op"] == "layer_norm")
        for half in layer_norm[0]["ratio"]
    ]
    assert facts["ratio"] == pytest.approx(min(largest), rel=0.06, abs=0.006)
    for half, name in (("float16", "Half"), ("bfloat16", "BFloat16")):
        assert f"avg_pool3d, forward, {half}: " in raised
        assert f"not implemented for '{name}'" in raised
