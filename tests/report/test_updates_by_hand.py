"""Scripts without a torch optimizer: what overflows did to their updates is told, and never that nothing trained."""

from dataclasses import replace

import pytest

from mpx.record import RunRecord
from mpx.record.model import Process
from mpx.record.parts import Overflow, OverflowCounts, Scaler, Steps, Substitution
from mpx.report import Options, findings, render, with_findings
from mpx.report.progress import progress_line

FLOOR = 2.0**-14
O1 = {
    "name": "O1",
    "dtype": "float16",
    "patch_torch_functions": True,
    "loss_scale": {"mode": "dynamic", "init": 65536.0, "backoff_factor": 0.5, "min": FLOOR},
    "skip_nonfinite": "auto",
    "collapse": {"after": 30},
}


def by_hand(
    passes: int, overflows: int, *, lowest: float | None = None, steps: Steps | None = None
) -> RunRecord:
    """A run whose first passes overflowed, each at half the scale of the one before."""
    scales = [2.0 ** (16 - number) for number in range(overflows)]
    events = [
        Overflow("backward_inf", backward=number, scale=scale, site="t.py:1", process="p")
        for number, scale in enumerate(scales, 1)
    ]
    final = lowest or 65536.0 / 2**overflows
    return RunRecord(
        preset=O1,
        script="t.py",
        status="completed",
        exit_code=0,
        processes=[Process("p", ended=True, trained=True, forwards=passes, backwards=passes)],
        forwards=passes,
        backwards=passes,
        steps=steps or Steps(),
        scalers=[Scaler("t.py:1", final, final, 65536.0, 65536.0, backoffs=overflows, overflows=overflows)],
        overflow_counts=OverflowCounts(backward_inf=overflows),
        overflows=events,
        substitutions=[Substitution("zeroed-gradients", "overflowed gradients set to 0", overflows)],
    )


def told(record: RunRecord) -> dict[str, str]:
    return {finding.id: finding.text for finding in findings(record)}


def test_updates_that_met_overflowed_gradients_are_told_as_normal_in_the_search():
    record = by_hand(100, 5)
    found = told(record)
    assert list(found) == ["scale-settled", "no-step"]
    assert found["scale-settled"].startswith(
        "5 overflows in the first 5 backward passes: the scale was finding"
    )
    assert "In 5 passes they overflowed, and mpx set them to 0" in found["no-step"]
    text = render(with_findings(record), Options())
    assert text.startswith("mpx  O1 float16 | t.py | 100 backward passes |")
    assert "replaced" not in text  # once is enough


@pytest.mark.parametrize("overflows", [0, 5])
def test_it_is_never_said_that_nothing_trained(overflows):
    record = with_findings(by_hand(100, overflows))
    assert "100 backward passes, no optimizer step" in render(record, Options(verbosity=-1))
    assert progress_line(record).startswith("100 backward passes")
    assert "nothing trained" not in render(record, Options())


def test_updates_that_never_met_a_gradient_learned_nothing():
    (found,) = (finding for finding in findings(by_hand(6, 6)) if finding.id == "nothing-applied")
    assert found.severity == "warning"
    assert "those of all 6 backward passes overflowed" in found.text
    assert "loss_scale.init=1024" in found.hint


def test_a_collapse_counts_no_steps():
    text = told(by_hand(40, 12, lowest=FLOOR))["scale-collapse"]
    assert "gradients overflowed in 12 of 40 backward passes" in text
    assert "step" not in text


def test_overflows_that_go_on_are_lost_updates():
    late = replace(by_hand(100, 0), overflow_counts=OverflowCounts(backward_inf=9))
    assert "each an update by hand lost. More than 1.0 % is not normal" in told(late)["frequent-overflows"]
    rare = replace(late, overflow_counts=OverflowCounts(backward_inf=1))
    assert "their gradients were set to 0" in told(rare)["rare-overflows"]


def test_beside_an_optimizer_the_gradients_that_no_one_steps_are_a_replacement():
    text = render(with_findings(by_hand(100, 2, steps=Steps(100, 98, 2))), Options())
    assert "replaced    overflowed gradients set to 0 (2 times)" in text
