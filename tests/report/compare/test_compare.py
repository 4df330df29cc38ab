"""Verdicts on levels, from records that were made up: what is taken, what is refused, and why."""

import json
import math
import re

import pytest

from mpx.record import RunRecord
from mpx.record.parts import LossCurve, Memory, Overflow, OverflowCounts, Scaler, Steps, StepTime, Throughput
from mpx.report import Options
from mpx.report.compare import COMPARISONS, Settings, Trial, compare, show

PASSES = 200


def falling(shift=0.0, worse_from=None, by=1.0, noise=0.0):
    """A loss that falls; from pass `worse_from` on it is `by` times that."""
    values = [1.0 / (1 + 0.05 * i) + 0.2 + shift + noise * (-1) ** i for i in range(PASSES)]
    return [
        value * (by if worse_from is not None and i >= worse_from else 1.0) for i, value in enumerate(values)
    ]


def trial(level, values=None, *, ms=20.0, peak=1000, metric=None, **changes):
    values = falling() if values is None else values
    told = {
        "preset": {
            "name": level,
            "loss_scale": {"mode": "dynamic", "min": 2.0**-14},
            "collapse": {"after": 30},
        },
        "status": "completed",
        "exit_code": 0,
        "backwards": PASSES,
        "steps": Steps(PASSES, PASSES, 0),
        "losses": [LossCurve("train.py:9", list(range(1, len(values) + 1)), values)],
        "throughput": Throughput(1000 / ms, StepTime(ms, 2 * ms)),
        "memory": Memory(peak, "cuda"),
    }
    return Trial(level, RunRecord(**{**told, **changes}), metric)


def judge(*trials, **settings):
    return compare(trials, Settings(**settings))


def ids(result, level):
    return {issue.id: issue for issue in result.issues if issue.level == level}


def test_a_faster_level_that_trains_alike_is_taken():
    result = judge(trial("O0"), trial("O1", ms=10.0))
    assert result.verdict == "O1"
    assert "2.00 times as fast" in result.reason
    assert result.issues == []


def test_of_several_the_fastest_is_taken():
    result = judge(trial("O0"), trial("O1", ms=12.0), trial("O2", ms=9.0), trial("O1-bf16", ms=11.0))
    assert result.verdict == "O2"


def test_a_level_that_gains_nothing_is_not_worth_it():
    result = judge(trial("O0"), trial("O1", ms=19.6, peak=970))
    assert result.verdict == "O0"
    assert result.reason.startswith("stay on `O0`")
    assert "`O1` (1.02 times as fast)" in result.reason


def test_less_memory_at_the_same_speed_is_worth_it():
    result = judge(trial("O0"), trial("O2", peak=600))
    assert result.verdict == "O2"
    assert "40.0 % less memory" in result.reason
    assert judge(trial("O0"), trial("O2", peak=600, ms=40.0)).verdict == "O0"


def test_a_gain_within_the_noise_of_the_baseline_is_no_gain():
    base = [trial("O0", ms=20.0), trial("O0", ms=30.0)]
    assert judge(*base, trial("O1", ms=17.0), trial("O1", ms=17.0)).verdict == "O0"
    assert judge(*base, trial("O1", ms=10.0), trial("O1", ms=10.0)).verdict == "O1"


def test_a_gain_that_not_every_turn_saw_is_no_gain():
    result = judge(trial("O0", ms=20.0), trial("O0", ms=20.0), trial("O1", ms=10.0), trial("O1", ms=21.0))
    assert result.levels[1].speedup == 2.0
    assert result.levels[1].speedup_low < 1.0
    assert result.verdict == "O0"


def test_divergence_names_the_pass_in_which_it_begins_and_rules_the_level_out():
    result = judge(trial("O0"), trial("O1", falling(worse_from=120, by=1.5), ms=5.0))
    issue = ids(result, "O1")["divergence"]
    assert 105 <= issue.at <= 125  # curves are smoothed over a twentieth on each side
    assert f"{issue.at}" in issue.text
    assert result.verdict == "O0"
    assert "divergence" in result.reason


def test_a_gap_that_closes_again_is_no_divergence():
    values = falling()
    values[80:100] = [2 * value for value in values[80:100]]
    result = judge(trial("O0"), trial("O1", values, ms=10.0))
    assert ids(result, "O1") == {}
    assert result.levels[1].largest_gap > 0.5
    assert 75 <= result.levels[1].largest_gap_at <= 105
    assert result.verdict == "O1"


def test_a_start_that_lags_by_a_few_skipped_steps_is_no_gap():
    """The search for the scale costs the first steps; by then the loss falls fast."""
    values = [falling()[0]] * 8 + falling()[:-8]
    result = judge(trial("O0"), trial("O1", values, ms=10.0))
    assert ids(result, "O1") == {}
    assert result.levels[1].largest_gap < 0.3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_divergence_from_its_first_pass_on(bad):
    values = falling()
    values[150:] = [bad] * 50
    result = judge(trial("O0"), trial("O1", values))
    issue = ids(result, "O1")["divergence"]
    assert 140 <= issue.at <= 151
    assert "not finite" in issue.text


def test_a_loss_that_is_lower_is_told_and_not_refused():
    result = judge(trial("O0"), trial("O1", falling(worse_from=0, by=0.8), ms=10.0))
    assert {id_: issue.severity for id_, issue in ids(result, "O1").items()} == {"loss-differs": "warning"}
    assert result.verdict == "O1"


def test_what_is_within_twice_the_noise_of_the_baseline_is_never_held_against_a_level():
    base = [trial("O0", falling()), trial("O0", falling(shift=0.02))]
    apart = trial("O1", falling(shift=0.035), ms=10.0)
    assert "divergence" in ids(judge(trial("O0"), apart, tolerance=0.05), "O1")
    result = judge(*base, apart, apart, tolerance=0.05)
    assert result.noise.final_gap == pytest.approx(0.07, abs=0.01)
    assert ids(result, "O1") == {}


def test_noise_is_the_farthest_pair_of_the_baseline():
    shifts = (0.0, 0.01, 0.03)
    result = judge(*(trial("O0", falling(shift=s), metric=80 + 100 * s) for s in shifts), trial("O1"))
    assert result.noise.final_gap == pytest.approx(0.1, abs=0.01)
    assert result.noise.metric_gap == pytest.approx(3 / 80, rel=0.05)
    assert judge(trial("O0"), trial("O1")).noise is None


def test_a_metric_that_regresses_although_the_loss_looks_normal():
    result = judge(trial("O0", metric=0.9), trial("O1", metric=0.8, ms=10.0))
    issue = ids(result, "O1")["metric-regression"]
    assert "although the loss looks normal" in issue.text
    assert result.verdict == "O0"


def test_a_metric_may_be_better_when_it_is_lower():
    base, other = trial("O0", metric=10.0), trial("O1", metric=8.0, ms=10.0)
    assert judge(base, other, higher_is_better=False).verdict == "O1"
    assert judge(base, other).verdict == "O0"
    worse = trial("O1", metric=12.0, ms=10.0)
    assert judge(base, worse, higher_is_better=False).verdict == "O0"


def test_a_metric_within_its_noise_is_normal():
    base = [trial("O0", metric=0.90), trial("O0", metric=0.94)]
    assert judge(*base, *[trial("O1", metric=0.86, ms=10.0)] * 2).verdict == "O1"


def test_a_metric_that_only_the_baseline_printed_is_told():
    result = judge(trial("O0", metric=0.9), trial("O1", ms=10.0))
    assert "metric-missing" in ids(result, "O1")
    assert result.verdict == "O0"


def test_a_scale_that_collapses_is_told_with_the_pass_in_which_it_reached_its_floor():
    history = [[0, 65536.0], [60, 1.0], [77, 2.0**-14]]
    record = {
        "scalers": [
            Scaler("a", 2.0**-14, 2.0**-14, 65536.0, 65536.0, backoffs=30, overflows=90, history=history)
        ],
        "overflow_counts": OverflowCounts(backward_inf=90),
        "steps": Steps(200, 110, 90),
        "longest_skip_run": 80,
    }
    result = judge(trial("O0"), trial("O1", ms=5.0, **record))
    assert ids(result, "O1")["scale-collapse"].at == 77
    assert result.verdict == "O0"


def test_without_a_floor_the_longest_row_of_overflows_says_where_it_begins():
    overflows = [Overflow("backward_inf", n, n - 1, 2.0) for n in (3, 50, *range(90, 130))]
    record = {
        "overflows": overflows,
        "longest_skip_run": 40,
        "steps": Steps(200, 158, 42),
        "overflow_counts": OverflowCounts(backward_inf=42),
    }
    result = judge(trial("O0"), trial("O1", scalers=[Scaler("a", 4.0, 2.0, 8.0, 8.0)], **record))
    assert ids(result, "O1")["long-skip-run"].at == 90


def test_a_level_that_fails_is_ruled_out_and_the_others_are_still_compared():
    failed = trial("O2", ms=5.0, status="failed", exit_code=1)
    result = judge(trial("O0"), trial("O1", ms=10.0), failed)
    assert ids(result, "O2")["run-failed"].text.startswith("a run ended with exit code 1")
    assert result.verdict == "O1"


def test_when_the_baseline_fails_there_is_no_verdict():
    result = judge(trial("O0", status="killed", exit_code=None, signal="SIGKILL"), trial("O1"))
    assert result.verdict is None
    assert "`O0` itself failed" in result.reason
    assert judge(trial("O0", losses=[]), trial("O1")).verdict is None


def test_a_level_without_a_loss_is_not_taken():
    result = judge(trial("O0"), trial("O1", losses=[], ms=5.0))
    assert result.verdict == "O0"
    assert "no loss of `O1`" in result.reason


def test_runs_of_different_length_are_compared_as_far_as_both_go():
    short = falling()[:100]
    assert judge(trial("O0"), trial("O1", short)).levels[1].final_gap == pytest.approx(0.0, abs=0.02)


def test_thinned_curves_are_laid_over_full_ones():
    values = falling()
    thinned = LossCurve("train.py:9", list(range(1, PASSES + 1, 7)), values[::7])
    result = judge(trial("O0"), trial("O1", losses=[thinned], ms=10.0))
    assert abs(result.levels[1].final_gap) < 0.02
    assert result.verdict == "O1"


def test_a_level_against_itself_is_nowhere_apart():
    result = judge(trial("O0", falling(noise=0.3)), trial("same", falling(noise=0.3)))
    assert (result.levels[1].final_gap, result.levels[1].largest_gap) == (0.0, 0.0)


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("unicode", [True, False])
def test_every_format_has_every_level_the_issues_and_the_verdict(name, unicode):
    base = [trial("O0", metric=0.9), trial("O0", metric=0.91)]
    bad = trial("O2", [*falling()[:150], *[math.nan] * 50], ms=1.0, metric=0.5)
    result = judge(
        *base,
        *[trial("O1", ms=10.0, metric=0.9)] * 2,
        bad,
        trial("O3", losses=[], memory=None, throughput=None),
    )
    text = re.sub("</?code>", "`", show(result, Options(unicode=unicode, width=100), format_name=name))
    for words in ("O0", "O1", "O2", "O3", "divergence", "take `O1`"):
        assert words in text
    if name == "json":
        assert json.loads(text)["verdict"] == "O1"
    if name == "terminal" and not unicode:
        assert text.isascii()


def test_curves_are_drawn_on_one_scale():
    text = show(judge(trial("O0"), trial("O1", falling(worse_from=0, by=3.0))), Options(unicode=True))
    bars = {
        line.split()[0]: line.split()[1]
        for line in text.splitlines()
        if line.endswith(("\u2581", "\u2582", "\u2583"))
    }
    assert "\u2588" in bars["O1"]
    assert "\u2588" not in bars["O0"]
