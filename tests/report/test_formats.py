"""The formats that become files: each is what its readers parse, and shows whatever a script called things."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from mpx.errors import UsageError
from mpx.record import Finding, RunRecord
from mpx.record.fold import fold
from mpx.record.parts import LossCurve, Overflow, Scaler, Verdict
from mpx.record.shards import read_shard
from mpx.report import FORMATS, Options, render, with_findings
from mpx.report.files import ReportFile, format_of, parse_report, write_reports
from mpx.report.formats.as_csv import COLUMNS

EVENTS = Path(__file__).parent.parent / "golden" / "events"
RUNS = sorted(path.stem for path in EVENTS.glob("*.jsonl"))
NASTY = 'a<b>&"c"|*d*_e_`f`\n\x1b[31m\udcff</script>'


def record_of(run: str) -> RunRecord:
    return with_findings(fold(read_shard(EVENTS / f"{run}.jsonl")))


def shown(record: RunRecord, name: str, **options) -> str:
    return render(record, Options(unicode=True, **options), format_name=name)


def nasty() -> RunRecord:
    """A run in which the user's own words are as bad as they can be, wherever they come up."""
    finding = Finding("odd", "warning", f"see {NASTY}", evidence=NASTY, hint=NASTY)
    return RunRecord(
        script=NASTY, command=["mpx", NASTY], notices=[NASTY], host=NASTY, status="completed", exit_code=0,
        preset={"name": NASTY, "dtype": "float16", "patch_torch_functions": True, "loss_scale": {"mode": "dynamic"}},
        backwards=3, findings=[finding],
        losses=[LossCurve(NASTY, [1, 2, 3], [1.0, math.nan, math.inf])],
        scalers=[Scaler(NASTY, 2.0, 1.0, 4.0, 4.0, history=[[1, 4.0], [2, 2.0]])],
        overflows=[Overflow("backward_inf", 2, 1, 4.0, NASTY, NASTY, NASTY)],
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_name_of_a_script_breaks_a_format(name):
    text = shown(nasty(), name)
    text.encode("utf-8")
    assert text.endswith("\n")
    assert "\x1b" not in text
    assert "\udcff" not in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_deterministic(name):
    assert shown(record_of("everything"), name) == shown(record_of("everything"), name)


def test_every_format_has_a_file_of_its_own():
    names = [row.file_name for row in FORMATS.values()]
    assert len({Path(name).suffix for name in names}) == len(names)
    assert [format_of(Path(name)) for name in names] == list(FORMATS)
    assert format_of(Path("x.pdf")) is None


class TestJunit:
    def suite(self, record: RunRecord) -> ET.Element:
        root = ET.fromstring(shown(record, "junit"))
        (suite,) = root
        return suite

    @pytest.mark.parametrize("run", RUNS)
    def test_the_counts_are_those_of_the_cases(self, run):
        suite = self.suite(record_of(run))
        cases = suite.findall("testcase")
        failed = [case for case in cases if case.find("failure") is not None]
        assert (suite.get("tests"), suite.get("failures")) == (str(len(cases)), str(len(failed)))

    @pytest.mark.parametrize(("run", "failed"), [("normal", False), ("killed", True), ("crash", True)])
    def test_the_run_is_a_case(self, run, failed):
        first = self.suite(record_of(run)).find("testcase")
        assert (first.find("failure") is not None) == failed

    def test_an_error_fails_a_warning_passes_and_a_note_is_no_case(self):
        findings = [
            Finding(severity, severity, "text", hint="hint") for severity in ("error", "warning", "info")
        ]
        record = replace(RunRecord(status="completed", exit_code=0), findings=findings)
        cases = self.suite(record).findall("testcase")[1:]
        assert [case.get("name") for case in cases] == ["error", "warning"]
        assert [case.find("failure") is not None for case in cases] == [True, False]
        assert "hint" in cases[0].find("failure").text
        assert cases[1].find("system-out").text.startswith("warning: text")

    def test_each_gate_is_one_case_and_their_finding_none(self):
        gates = [
            Verdict("overflow_rate>5%", passed=False, value=0.1, text="10 %"),
            Verdict("steps<1", passed=True),
        ]
        record = with_findings(
            RunRecord(status="completed", exit_code=0, gates=gates, forwards=1, processes=[])
        )
        cases = [
            case for case in self.suite(record).findall("testcase") if case.get("classname") == "mpx.gates"
        ]
        assert [case.get("name") for case in cases] == ["overflow_rate>5%", "steps<1"]
        assert [case.find("failure") is not None for case in cases] == [True, False]
        assert cases[0].find("failure").get("message") == "`overflow_rate>5%`: 10 %"
        assert "gates-failed" in [finding.id for finding in record.findings]
        assert "gates-failed" not in [case.get("name") for case in self.suite(record).findall("testcase")]


class TestCsv:
    def rows(self, record: RunRecord) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(shown(record, "csv"))))

    @pytest.mark.parametrize("run", RUNS)
    def test_every_row_has_every_column(self, run):
        for row in csv.reader(io.StringIO(shown(record_of(run), "csv"))):
            assert len(row) == len(COLUMNS)

    def test_the_numbers_come_back_exactly(self):
        record = record_of("everything")
        rows = self.rows(record)
        losses = [float(row["value"]) for row in rows if row["quantity"] == "loss"]
        assert losses == [value for curve in record.losses for value in curve.value]
        scales = [[float(r["at"]), float(r["value"])] for r in rows if r["quantity"] == "loss_scale"]
        assert scales == [point for item in record.scalers for point in item.history]
        (peak,) = (row for row in rows if row["quantity"] == "peak_memory" and not row["at"])
        assert int(peak["value"]) == record.memory.peak_bytes

    def test_what_is_not_finite_is_written_as_data_frames_read_it(self):
        values = [row["value"] for row in self.rows(nasty()) if row["quantity"] == "loss"]
        assert values == ["1.0", "nan", "inf"]


class TestMarkdown:
    def test_what_stands_in_a_cell_stays_in_it(self):
        for line in shown(nasty(), "markdown").splitlines():
            if line.startswith("| notice"):
                assert len(re.findall(r"(?<!\\)\|", line)) == 3

    def test_markup_of_a_name_is_escaped_outside_code(self):
        text = re.sub(r"`[^`]*`", "", shown(nasty(), "markdown"))
        assert not re.search(r"(?<!\\)[<*](?!\*|/?details|/?summary)(?<!\*\*)[a-z/]", text.replace("**", ""))

    def test_the_gravest_stands_first_and_the_record_last(self):
        lines = shown(record_of("everything"), "markdown", run_path=Path("/runs/x")).splitlines()
        assert lines[0].startswith("### mpx: O1 float16 · train.py")
        assert lines[2].startswith("- **warning**")
        assert lines[-1] == "Record: `/runs/x`"


class Page(HTMLParser):
    """The elements of a page by name, and how many are open at its end."""

    void = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


class TestHtml:
    @pytest.mark.parametrize("record", [*map(record_of, RUNS), nasty()], ids=[*RUNS, "nasty"])
    def test_the_page_is_well_formed_and_its_ids_are_its_own(self, record):
        page = Page(shown(record, "html"))
        assert page.open == []
        ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        named = [a["aria-labelledby"].split() for _, a in page.found if "aria-labelledby" in a]
        assert {name for names in named for name in names} <= set(ids)

    @pytest.mark.parametrize("run", RUNS)
    def test_every_chart_has_a_name_a_description_and_its_values_as_a_table(self, run):
        text = shown(record_of(run), "html")
        for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
            assert figure.count('role="img"') == 1
            assert re.search(r"<title id=.*?>\w", figure)
            assert re.search(r"<desc id=.*?>\w", figure)
            assert "<table>" in figure
            assert json.loads(re.search(r'<script type="application/json">(.*?)</script>', figure)[1])

    def test_nothing_is_loaded_from_anywhere(self):
        page = Page(shown(record_of("everything"), "html"))
        for _, attributes in page.found:
            assert not {"src", "action", "style", "onload"} & set(attributes)
            assert attributes.get("href", "data:,") == "data:,"
        (policy,) = (a["content"] for a in page.of("meta") if a.get("http-equiv"))
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy

    def test_a_screen_reader_hears_no_decoration(self):
        page = Page(shown(record_of("everything"), "html"))
        for picture in page.of("svg"):
            assert picture.get("role") == "img" or picture.get("aria-hidden") == "true"
        assert all(header.get("scope") == "col" for header in page.of("th"))
        assert page.of("html") == [{"lang": "en"}]
        for _, attributes in page.found:
            assert "tabindex" not in attributes or attributes["aria-label"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("html", ReportFile("html")),
        ("junit:out/mpx.xml", ReportFile("junit", Path("out/mpx.xml"))),
        ("csv:C:\\x.csv", ReportFile("csv", Path("C:\\x.csv"))),
    ],
)
def test_a_report_is_asked_for_by_format_and_path(text, wanted):
    assert parse_report(text) == wanted


@pytest.mark.parametrize("text", ["pdf", "html:", "", ":x", "HTML"])
def test_what_is_no_report_is_refused_with_what_is(text):
    with pytest.raises(UsageError, match="Expected"):
        parse_report(text)


def test_a_report_that_cannot_be_written_is_one_line_and_stops_no_other(tmp_path):
    (tmp_path / "file").touch()
    wanted = [ReportFile("html", tmp_path / "file" / "x.html"), ReportFile("csv"), ReportFile("junit")]
    said = []
    written = write_reports(record_of("normal"), wanted, into=tmp_path, say=said.append)
    assert written == [tmp_path / "report.csv", tmp_path / "report.xml"]
    assert all(path.stat().st_size for path in written)
    assert len(said) == 1
    assert "\n" not in said[0]


def test_a_fault_in_a_format_is_one_line_too(tmp_path, monkeypatch):
    monkeypatch.setattr("mpx.report.formats.as_csv.as_csv", lambda record, options: 1 / 0)
    said = []
    write_reports(RunRecord(), [ReportFile("csv"), ReportFile("json")], into=tmp_path, say=said.append)
    assert said == ["the csv report failed: ZeroDivisionError('division by zero')"]
    assert (tmp_path / "report.json").exists()
