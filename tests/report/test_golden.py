"""What whole runs look like, from the events that their processes left to the text that a user reads.

`tests/golden/events/*.jsonl` is the input. `MPX_UPDATE_GOLDEN=1 pytest tests/report/test_golden.py` rewrites the
rest: read the diff. A record of an older schema (`records/v<n>`) is never rewritten: it must stay readable.
"""

import json
import os
import re
from pathlib import Path

import pytest

from mpx.record import RunRecord
from mpx.record.fold import fold
from mpx.record.shards import read_shard
from mpx.report import FORMATS, Options, render, with_findings

GOLDEN = Path(__file__).parent.parent / "golden"
RUNS = sorted(path.stem for path in (GOLDEN / "events").glob("*.jsonl"))
RECORDS = sorted((GOLDEN / "records").glob("v*/*.json"))
NEWEST = GOLDEN / "records" / f"v{RunRecord.SCHEMA}"
RUN_PATH = Path("/runs/20251124T160000Z-train-O1-7f3a")
LOOKS = {
    "plain": Options(run_path=RUN_PATH),
    "tty": Options(run_path=RUN_PATH, unicode=True, color=True, width=100),
    "long": Options(run_path=RUN_PATH, verbosity=1),
    "line": Options(run_path=RUN_PATH, verbosity=-1),
}
# `json` is the record itself. Of a page the content counts here: its style and its script are files of their own.
AS_FILES = sorted(set(FORMATS) - {"terminal", "json"})
OF_THE_PAGE = re.compile(
    r"(?<=<style>).*?(?=</style>)|(?<=<script>).*?(?=</script>)|default-src [^\"]*", re.DOTALL
)


def record_of(run: str) -> RunRecord:
    return with_findings(fold(read_shard(GOLDEN / "events" / f"{run}.jsonl")))


def agrees(path: Path, text: str) -> bool:
    if os.environ.get("MPX_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


def test_the_runs_that_must_be_told_apart_are_all_here():
    named = {"normal", "collapse", "nan-loss", "forward-inf", "killed", "inference", "nothing", "O0"}
    assert named <= set(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_the_events_fold_into_the_record(run):
    assert agrees(NEWEST / f"{run}.json", record_of(run).to_json())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("look", LOOKS)
def test_the_report_reads(run, look):
    assert agrees(GOLDEN / "terminal" / look / f"{run}.txt", render(record_of(run), LOOKS[look]))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_record_ever_written_can_be_read_and_rendered(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    record = RunRecord.from_dict(data)
    assert record.to_dict().items() >= data.items()
    for name in FORMATS:
        assert render(with_findings(record), LOOKS["plain"], format_name=name)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize("name", AS_FILES)
def test_every_record_ever_written_reads_in_every_format(name, path):
    record = with_findings(RunRecord.from_dict(json.loads(path.read_text(encoding="utf-8"))))
    text = OF_THE_PAGE.sub("", render(record, Options(run_path=RUN_PATH, unicode=True), format_name=name))
    suffix = Path(FORMATS[name].file_name).suffix
    assert agrees(GOLDEN / name / path.parent.name / f"{path.stem}{suffix}", text)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("look", ["plain", "tty"])
def test_a_short_report_has_at_most_18_lines_and_ends_with_the_path(run, look):
    lines = render(record_of(run), LOOKS[look]).splitlines()
    assert len(lines) <= 18
    assert lines[-1].endswith(str(RUN_PATH))


@pytest.mark.parametrize("run", RUNS)
def test_one_line_is_one_line(run):
    assert render(record_of(run), LOOKS["line"]).count("\n") == 1


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("look", ["plain", "long", "line"])
def test_where_no_terminal_reads_the_text_is_plain_ascii(run, look):
    text = render(record_of(run), LOOKS[look])
    assert text.isascii()
    assert all(char == "\n" or char.isprintable() for char in text)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("width", [60, 100, 120])
def test_lines_keep_to_the_width_but_for_what_must_not_be_cut(run, width):
    lines = render(record_of(run), Options(run_path=RUN_PATH, width=width)).splitlines()
    for line in lines[1:-1]:
        assert len(line) <= width or " " not in line[13:].strip()


@pytest.mark.parametrize("run", RUNS)
def test_json_is_the_record_whatever_the_look(run):
    record = record_of(run)
    for look in LOOKS.values():
        assert json.loads(render(record, look, format_name="json")) == record.to_dict()


def test_the_long_report_holds_back_nothing():
    text = render(record_of("everything"), LOOKS["long"])
    assert "left out" not in text
    for finding in record_of("everything").findings:
        assert "".join(finding.text.split())[:60] in "".join(text.split())
