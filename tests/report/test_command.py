"""`mpx report`: any run, any time, without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpx.cli.report import report
from mpx.errors import RecordError
from mpx.record import RunDirectory
from mpx.record.shards import read_shard
from mpx.report import FORMATS, Options, render, with_findings

EVENTS = Path(__file__).parent.parent / "golden" / "events"


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunDirectory:
    """A run that was killed: its processes left events, and nobody wrote `run.json`."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.create(None, cwd=tmp_path, target_name="train.py", level="O1")
    for event in read_shard(EVENTS / "killed.jsonl"):
        directory.shard(event.get("process", "supervisor")).write(event)
    assert not (directory.path / "run.json").exists()
    return directory


def call(*args):
    return CliRunner().invoke(report, args, catch_exceptions=False)


def test_the_latest_run_is_reported_though_nobody_finished_its_record(run):
    result = call()
    assert result.exit_code == 0
    assert "killed by SIGKILL" in result.stdout
    assert result.stdout.isascii()
    assert len(result.stdout.splitlines()) <= 18
    assert result.stdout.splitlines()[-1].split() == ["record", os.path.relpath(run.path)]


def test_a_run_is_reported_by_a_part_of_its_name_and_by_its_record(run):
    run.write_record(run.record())
    assert call(run.path.name[-4:]).stdout == call(str(run.path / "run.json")).stdout == call().stdout


def test_json_is_the_record(run):
    data = json.loads(call("--format", "json").stdout)
    assert data["status"] == "killed"
    assert [finding["id"] for finding in data["findings"]] == ["killed", "scale-settled"]


def loaded_by(*words):
    """Return the modules that a command has loaded when it ends."""
    code = "import sys; from mpx.cli import cli\ntry: cli()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_only_what_a_command_needs_is_loaded(run):
    """An answer must come at once: each of these costs more time to load than it takes to use."""
    html, model = "mpx.report.formats.as_html", "mpx.record.parts"
    heavy = {
        html,
        "mpx.report.charts",
        "mpx.report.formats.junit",
        "hashlib",
        "xml",
        "yaml",
        "difflib",
        "torch",
    }
    assert not loaded_by("--help") & {*heavy, model, "mpx.report"}
    assert not loaded_by("run", "--help") & {*heavy, model, "mpx.report"}
    terminal = loaded_by("report")
    assert model in terminal
    assert not terminal & heavy
    assert {html, "mpx.report.charts"} <= loaded_by("report", "--format", "html")


def test_quiet_is_one_line_and_verbose_has_tables(run):
    assert call("-q").stdout.count("\n") == 1
    assert "processes that imported torch:" in call("-v").stdout


def test_quiet_and_verbose_exclude_each_other(run):
    result = call("-q", "-v")
    assert result.exit_code == 2
    assert "contradict" in result.stderr


def test_a_run_that_is_not_there_is_an_error(run):
    with pytest.raises(RecordError, match="no run `elsewhere`"):
        call("elsewhere")


def test_an_unknown_format_names_those_that_exist(run):
    result = call("--format", "xml")
    assert result.exit_code == 2
    assert ", ".join(f"'{name}'" for name in FORMATS) in result.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_a_report_goes_to_a_file_whose_suffix_says_the_format(run, name, tmp_path):
    path = tmp_path / "new folder" / FORMATS[name].file_name
    result = call("--output", str(path), *(["--format", "json"] if name == "json" else []))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert str(path) in result.stderr
    record = with_findings(run.record())
    options = Options(run_path=run.path, unicode=True)
    assert path.read_text(encoding="utf-8") == render(record, options, format_name=name)


def test_into_a_folder_a_report_goes_under_its_own_name(run, tmp_path):
    assert call("--format", "markdown", "--output", str(tmp_path)).exit_code == 0
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("### mpx: O1 float16")


def test_a_report_that_cannot_be_written_is_an_error(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="report cannot be written"):
        call("--format", "html", "--output", str(tmp_path / "file" / "report.html"))


def test_a_link_is_written_through_and_never_replaced(run, tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "real.csv")
    call("--output", str(link))
    assert link.is_symlink()
    assert (tmp_path / "real.csv").read_text(encoding="utf-8").startswith("quantity,")


def test_what_is_not_for_a_terminal_is_utf_8_whatever_the_locale(run):
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for name in FORMATS:
        command = [sys.executable, "-m", "mpx", "report", "--format", name]
        child = subprocess.run(command, capture_output=True, check=True, env=environ)
        text = child.stdout.decode("ascii" if name == "terminal" else "utf-8")
        assert "O1" in text


def test_the_schema_of_a_record_needs_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(call("--schema").stdout)["properties"]["schema"] == {"const": 1}


def test_neither_torch_nor_rich_is_imported(run):
    code = "import sys; from mpx.cli.report import report; report(standalone_mode=False); print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "killed by SIGKILL" in child.stdout
    assert not {"torch", "rich", "numpy", "yaml"} & set(child.stdout.splitlines()[-1].split())
