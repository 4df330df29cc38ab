"""The terminal format: the right look for each stream, true numbers, and never an exception."""

import io
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpx.record import RunRecord
from mpx.record.model import Process
from mpx.record.parts import (
    Coverage,
    Exponents,
    Finding,
    Gradients,
    LossCurve,
    OptimizerSteps,
    Scaler,
    Steps,
    Substitution,
    Underflow,
)
from mpx.report import FORMATS, Options, render, with_findings, wording
from mpx.report.charts import charts
from mpx.report.sparkline import NOT_FINITE, means, sparkline, steps


class Stream(io.TextIOWrapper):
    def __init__(self, *, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize(
    ("tty", "environ", "fancy"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"CI": "true"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_only_a_terminal_that_wants_them_gets_colours_and_bars(tty, environ, fancy):
    options = Options.for_stream(Stream(tty=tty), environ)
    assert (options.color, options.unicode) == (fancy, fancy)


@pytest.mark.parametrize(("encoding", "bars"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_bars_need_an_encoding_that_has_them(encoding, bars):
    options = Options.for_stream(Stream(tty=True, encoding=encoding), {})
    assert options.unicode == bars


def test_the_width_is_the_terminals_within_reason(monkeypatch):
    widths = {}
    for columns in ("20", "80", "400"):
        monkeypatch.setenv("COLUMNS", columns)
        widths[columns] = Options.for_stream(Stream(tty=True), {}).width
    assert widths == {"20": 60, "80": 80, "400": 120}
    assert Options.for_stream(Stream(tty=False), {}).width == 100


def test_what_the_stream_cannot_encode_is_escaped():
    record = RunRecord(script="trän.py", status="completed", exit_code=0)
    assert "tr\\xe4n.py" in render(record, Options(encoding="ascii"))
    assert "trän.py" in render(record, Options(encoding="utf-8"))
    assert "\\udcff" in render(RunRecord(script="\udcff.py"), Options(encoding="utf-8"))


def test_a_name_cannot_move_the_cursor_or_break_the_line():
    record = RunRecord(script="a\x1b[31m\nb.py", notices=["x\ry"], status="completed", exit_code=0)
    text = render(record, Options())
    assert "\x1b" not in text
    assert "\r" not in text
    assert "a\\x1b[31m\\nb.py" in text


counts = st.integers(0, 2**40)
sane_steps = st.builds(Steps, counts, counts, counts)
trees = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=5),
        "dtype": st.sampled_from(["float16", "bfloat16"]),
        "cast_model_type": st.sampled_from(["none", "half", "float32"]),
        "patch_torch_functions": st.booleans(),
        "loss_scale": st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["dynamic", "static", "none"]),
                "min": st.floats(0, 1),
                "growth_interval": counts,
                "backoff_factor": st.just(0.5),
            },
        ),
        "skip_nonfinite": st.sampled_from(["auto", "always", "never"]),
        "collapse": st.fixed_dictionaries({"after": st.integers(1, 50)}),
    },
)
any_record = st.builds(
    RunRecord,
    schema=st.just(1),
    preset=trees,
    casts=st.dictionaries(st.text(max_size=3), counts, max_size=3),
    origin=st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3),
    forwards=counts,
    backwards=counts,
    nonfinite_losses=counts,
    longest_skip_run=counts,
    steps=sane_steps,
    status=st.sampled_from(["completed", "failed", "interrupted", "killed", "unknown"]),
)


@settings(max_examples=300)
@given(any_record, st.sampled_from([-1, 0, 1]), st.booleans(), st.integers(60, 120))
def test_every_record_can_be_rendered(record, verbosity, fancy, width):
    options = Options(verbosity=verbosity, color=fancy, unicode=fancy, width=width)
    for name in FORMATS:
        text = render(with_findings(record), options, format_name=name)
        assert text.endswith("\n")
    if verbosity == 0:
        assert render(with_findings(record), options).count("\n") <= 18


def test_however_much_there_is_to_tell_18_lines_remain_and_the_gravest_stay():
    many = [Finding(f"f{i}", "warning", "word " * 60, hint="h " * 40) for i in range(30)]
    record = RunRecord(findings=[Finding("e", "error", "the gravest"), *many], status="failed", exit_code=1)
    text = render(record, Options(width=60))
    assert text.count("\n") <= 18
    assert "the gravest" in text
    assert "30 entries left out: see `mpx report -v`" in text or "left out" in text


def test_nothing_unusual_is_said_only_of_a_run_that_completed_without_a_warning():
    record = RunRecord(status="completed", exit_code=0)
    assert "nothing unusual" in render(record, Options())
    for other in (
        RunRecord(status="failed", exit_code=1),
        RunRecord(status="killed", signal="SIGKILL"),
        RunRecord(status="unknown"),
        RunRecord(status="completed", exit_code=0, findings=[Finding("x", "warning", "w")]),
    ):
        assert "nothing unusual" not in render(other, Options())


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        ({"name": "--opt-level"}, "O1, chosen by --opt-level"),
        ({"name": "default"}, "O1, the default, as no --opt-level was given"),
        ({"name": "mpx.yaml:3"}, "O1, chosen by mpx.yaml:3"),
        ({"name": "--opt-level", "dtype": "--dtype"}, "dtype from --dtype"),
        (
            {
                "name": "--opt-level",
                "dtype": "configs/O1-bf16.yaml:4",
                "loss_scale.mode": "derived from dtype",
            },
            None,
        ),
        ({"name": "--opt-level", "ops.half": "configs/O1.yaml:3 + --half-op"}, "ops.half from --half-op"),
        (
            {"name": "team.yaml", **{key: f"team.yaml:{i}" for i, key in enumerate("abcd")}},
            "4 values from team.yaml",
        ),
    ],
)
def test_where_the_level_and_its_changes_came_from(origin, text):
    report = render(RunRecord(preset={"name": "O1"}, origin=origin), Options())
    [line] = [line for line in report.splitlines() if line.startswith(" preset")]
    if text is None:
        assert line.strip().endswith("chosen by --opt-level")
    else:
        assert text in line


def scaled(mode, dtype="float16", **fields):
    preset = {"name": "O1", "dtype": dtype, "patch_torch_functions": True, "loss_scale": {"mode": mode}}
    item = Scaler(
        site="t.py:1", **{"final": 4096.0, "min": 4096.0, "max": 65536.0, "init": 65536.0, **fields}
    )
    return RunRecord(preset=preset, backwards=100, scalers=[item])


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            scaled("dynamic", backoffs=4, min=1024.0, growths=1),
            "65536 -> 4096 | lowest 1024 | raised once, lowered 4 times",
        ),
        (scaled("dynamic", final=65536.0, min=65536.0), "65536, unchanged"),
        (scaled("static", final=128.0), "128, fixed by the preset"),
        (scaled("none"), "off: the preset turns it off"),
        (scaled("none", "bfloat16"), "off: bfloat16 has the range of float32 and needs none"),
    ],
)  # fmt: skip
def test_the_loss_scale_line_says_what_the_scale_did(record, text):
    [line] = [line for line in render(record, Options()).splitlines() if line.startswith(" loss scale")]
    assert line == f" loss scale  {text}"


def test_with_several_losses_the_line_says_which_one_it_shows():
    curves = [LossCurve("gan.py:80", [1, 2, 3], [3.0, 2.0, 1.0]), LossCurve("gan.py:91", [1], [9.0])]
    text = render(RunRecord(losses=curves), Options())
    assert "3 -> 1 | one of 2 losses, of `gan.py:80`" in text


FP16 = {"name": "O1", "dtype": "float16", "patch_torch_functions": True}


def test_one_loss_of_several_optimizers_that_take_turns_is_no_ones_alone():
    folds = [OptimizerSteps(f"SGD {number}", attempted=20, applied=20) for number in range(3)]
    curve = LossCurve("t.py:5", [1, 60], [3.0, 2.0])
    steps = Steps(60, 60)
    record = RunRecord(preset=FP16, backwards=60, steps=steps, optimizers=folds, losses=[curve])
    assert "3 -> 2 | of 3 optimizers in turn" in render(record, Options())
    together = replace(record, backwards=20)  # each pass is for all of them
    assert "in turn" not in render(together, Options())


def test_what_could_not_be_counted_says_why():
    record = RunRecord(preset=FP16, backwards=5, coverage=Coverage(missing="torch.compile"))
    assert "half work   not counted: torch.compile" in render(record, Options())


def test_operations_of_which_the_same_is_said_share_a_row():
    said = "no float16 kernel on this cpu, ran in FP32"
    told = [("op:det", f"det: {said}", 30), ("op:inv", f"inv: {said}", 1), ("adam", "Adam: eps raised", 2)]
    record = RunRecord(substitutions=[Substitution(name, text, number) for name, text, number in told])
    rows = [line for line in render(record, Options()).splitlines() if line.startswith(" replaced")]
    assert rows == [
        f" replaced    det (30 times), inv (once): {said}",
        " replaced    Adam: eps raised (2 times)",
    ]


def test_where_the_scripts_own_amp_is_kept_nothing_is_said_of_what_it_scales():
    underflow = Gradients(
        3, half="float16", exponents=Exponents(-3, 11, [1] * 15), underflow=Underflow(0.0, 0.0)
    )
    record = RunRecord(
        preset={**FP16, "script_amp": "keep"},
        backwards=30,
        steps=Steps(30, 29, 1),
        saw_script_amp=True,
        gradients=underflow,
    )
    text = render(record, Options())
    assert "1 skipped by the script's own GradScaler" in text
    assert "loss scale  the script's own" in text
    assert "overflows" not in text
    assert "gradients   " not in text
    assert not [chart for chart in charts(record) if chart.id == "gradients"]


def test_a_command_is_named_with_the_one_script_below_it():
    command = RunRecord(script="/opt/bin/torchrun", target_kind="command", status="completed", exit_code=0)
    ranks = [Process(f"r{rank}", rank=rank, trained=True, argv=["src/ddp.py", "--x"]) for rank in (0, 1)]
    assert render(command, Options()).startswith("mpx  ? | torchrun | ")
    assert render(replace(command, processes=ranks), Options()).startswith("mpx  ? | torchrun: ddp.py | ")
    several = [*ranks, Process("eval", trained=True, argv=["eval.py"])]
    assert render(replace(command, processes=several), Options()).startswith("mpx  ? | torchrun | ")


def test_ranks_and_independent_processes_say_whose_counts_these_are():
    ranks = [Process(f"r{rank}", rank=rank, trained=True) for rank in (0, 1)]
    assert "2 ranks worked" in render(RunRecord(processes=ranks), Options())
    assert "rank 0" in render(RunRecord(processes=ranks), Options())
    alone = [Process(name, trained=True) for name in "ab"]
    assert "2 processes worked; counts are their sum" in render(RunRecord(processes=alone), Options())
    assert " processes" not in render(RunRecord(processes=alone[:1]), Options())


def test_sparklines_span_the_range_and_mark_what_is_not_finite():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert sparkline([0.0, math.nan, 1.0, math.inf]) == f"▁{NOT_FINITE}█{NOT_FINITE}"
    assert sparkline([]) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 40))
def test_a_stretch_without_points_is_a_gap_and_every_point_counts_once(values, width):
    result = means([float(i) for i in range(len(values))], values, width)
    assert len(result) == min(width, len(values))
    known = [value for value in result if value is not None]
    assert min(known) >= min(values) - 1e-6
    assert max(known) <= max(values) + 1e-6


def test_a_scale_history_begins_with_the_first_scale_and_ends_with_the_last():
    assert steps([[1, 16], [2, 8], [4, 4]], 100.0, 5) == [16, 4, 4, 4, 4]
    assert steps([[1, 16], [90, 8]], 100.0, 4) == [16, 16, 16, 8]
    assert steps([], 100.0, 4) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (wording.count(1, "step"), "1 step"),
        (wording.count(1200, "backward pass"), "1,200 backward passes"),
        (wording.count(0, "entry"), "0 entries"),
        (wording.share(3, 1200, "step"), "3 of 1,200 steps (0.25 %)"),
        (wording.share(0, 0, "step"), "0 of 0 steps"),
        (wording.percent(0.0), "0 %"),
        (wording.percent(1.0), "100 %"),
        (wording.percent(1e-9), "less than 0.01 %"),
        (wording.percent(0.99999), "more than 99.9 %"),
        (wording.percent(0.973), "97.3 %"),
        (wording.seconds(0.0), "0.00 s"),
        (wording.seconds(59.96), "1 min 00 s"),
        (wording.seconds(192.4), "3 min 12 s"),
        (wording.seconds(3599.7), "1 h 00 min"),
        (wording.seconds(90061.0), "25 h 01 min"),
        (wording.seconds(math.inf), "inf s"),
        (wording.milliseconds(0.0123), "0.0123 ms"),
        (wording.milliseconds(151.2), "151 ms"),
        (wording.milliseconds(999.4), "999 ms"),
        (wording.milliseconds(1956.0), "1.96 s"),
        (wording.bytes_(0), "0 B"),
        (wording.bytes_(1023), "1023 B"),
        (wording.bytes_(1482 * 2**20), "1.45 GiB"),
        (wording.bytes_(999 * 2**10), "999 KiB"),
        (wording.bytes_(2**60), "1048576 TiB"),
        (wording.scale(65536.0), "65536"),
        (wording.scale(2.0**-14), "2^-14"),
        (wording.scale(0.5), "2^-1"),
        (wording.scale(2.0**24), "16777216"),
        (wording.scale(2.0**30), "2^30"),
        (wording.scale(0.0), "0.0"),
        (wording.scale(math.nan), "nan"),
        (wording.setting(8192.0), "8192"),
        (wording.setting(2.0**-3), "2**-3"),
        (wording.loss(math.nan), "nan"),
        (wording.loss(1.349871), "1.3499"),
    ],
)
def test_numbers_read(text, expected):
    assert text == expected
