"""`mpx run --report`: files at the end of a run, that cost it nothing."""

import re
import sys

import jsonschema
import pytest

from mpx.presets.policy import field_specs
from mpx.record.schema import record_schema
from mpx.report import FORMATS


@pytest.fixture
def ends(shell):
    """Return a script that ends as its argument says."""
    return shell.script("ends.py", "import sys\nprint('ran')\nsys.exit(int(sys.argv[1]))\n").name


def test_reports_go_into_the_run_directory_under_their_own_names(shell, ends):
    done = shell.mpx("-O", "O0", *(word for name in FORMATS for word in ("--report", name)), ends, "0")
    assert done.returncode == 0
    assert done.stdout == b"ran\n"
    (run,) = done.runs
    for row in FORMATS.values():
        assert (run / row.file_name).stat().st_size
        assert f"wrote `{run / row.file_name}`" in done.text
    assert (run / "report.json").read_bytes() == (run / "run.json").read_bytes()


def test_a_report_goes_where_it_is_sent_also_when_the_script_fails(shell, ends):
    done = shell.mpx(
        "-O", "O0", "-q", "--report", "junit:out/mpx.xml", "--report", "html:here.html", ends, "3"
    )
    assert done.returncode == 3
    assert 'failures="1"' in (shell.cwd / "out" / "mpx.xml").read_text(encoding="utf-8").splitlines()[1]
    assert (shell.cwd / "here.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("code", [0, 3])
def test_a_report_that_cannot_be_written_is_one_line_and_changes_no_exit_code(shell, ends, code):
    done = shell.mpx("-O", "O0", "-q", "--report", "html:ends.py/x.html", "--report", "csv", ends, str(code))
    assert done.returncode == code
    (said,) = (line for line in done.text.splitlines() if "cannot be written" in line)
    assert "ends.py/x.html" in said
    assert (done.runs[0] / "report.csv").exists()


@pytest.mark.parametrize("report", ["pdf", "html:"])
def test_a_report_that_makes_no_sense_is_refused_before_the_start(shell, ends, report):
    done = shell.mpx("-O", "O0", "--report", report, ends, "0")
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.text.startswith("error: there is no ")
    assert done.runs == []


def test_one_rank_of_a_launcher_cannot_report_and_says_how_to(shell, ends):
    done = shell.mpx("-O", "O0", "--report", "html", ends, "0", env={"RANK": "0", "TORCHELASTIC_RUN_ID": "x"})
    assert done.returncode == 2
    assert "`mpx run --report ... -- torchrun ... train.py`" in done.text


def test_a_run_inside_a_run_leaves_reports_to_the_outer_one(shell, ends):
    inner = shell.script("inner.sh", f'exec "$@" run --report html {ends} 0\n').name
    words = ("-O", "O0", "--as", "command", "sh", inner, sys.executable, "-m", "mpx")
    done = shell.mpx(*words)
    assert done.returncode == 0
    assert "`--report` is left to the run around this one" in done.text
    assert len(done.runs) == 1


TRAINS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""


def test_the_record_of_a_real_training_fits_the_schema_and_fills_every_chart(shell):
    script = shell.script("train.py", TRAINS).name
    settings = ("--set", "loss_scale.init=2**24", "--set", "loss_scale.growth_interval=10")
    done = shell.mpx("-O", "O1", *settings, "--report", "html:report.html", script)
    assert done.returncode == 0, done.text
    jsonschema.Draft202012Validator(record_schema()).validate(done.record)
    page = (shell.cwd / "report.html").read_text(encoding="utf-8")
    drawn = ["loss", "loss-scale", "overflows", "gradients", "step-time", "memory"]
    assert re.findall(r'<figure id="([^"]*)"', page) == drawn


def test_a_series_may_be_as_short_as_a_preset_allows(shell):
    script = shell.script("train.py", TRAINS).name
    least = field_specs()["monitors.history_points"].at_least
    done = shell.mpx("-O", "O1", "--set", f"monitors.history_points={least:.0f}", script)
    assert done.returncode == 0, done.text
    assert done.record["faults"] == []
    assert len(done.record["losses"][0]["value"]) <= least
