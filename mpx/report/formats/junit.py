"""The report as JUnit XML: what a CI server reads as a list of passed and failed cases."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from mpx.record.model import RunRecord
from mpx.report.facts import half_type, level, program
from mpx.report.formats.options import Options
from mpx.report.headline import ending, headline
from mpx.report.wording import printable
from mpx.values import frozen

__all__ = ["junit"]


@frozen
class _Case:
    """One test case: `failure` is why it failed, `output` what there is to read although it did not."""

    group: str
    name: str
    failure: str = ""
    output: str = ""


def junit(record: RunRecord, options: Options) -> str:
    """Return a suite with a case for the run, one for each gate, and one for each finding that is more than a note.

    An error fails its case; a warning passes with its text as output. Whether a warning should stop a pipeline is for
    a gate to say.
    """
    cases = [case for source in (_run, _gates, _findings) for case in source(record)]
    failures = sum(bool(case.failure) for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0"}
    time = {"time": f"{record.wall_s or 0.0:.3f}"}
    root = ET.Element("testsuites", {"name": "mpx", **counts, **time})
    name = printable(f"mpx {level(record)} {program(record)}")
    described = {"timestamp": record.started, "hostname": record.host}
    known = {key: printable(value) for key, value in described.items() if value}
    suite = ET.SubElement(root, "testsuite", {"name": name, **counts, **time, **known})
    _add_properties(suite, record, options)
    for case in cases:
        _add_case(suite, case, record)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _run(record: RunRecord) -> Iterator[_Case]:
    failure = "" if record.status == "completed" else f"the run {record.status}: {ending(record)}"
    yield _Case("run", "the run completes", printable(failure), " | ".join(headline(record)))


def _gates(record: RunRecord) -> Iterator[_Case]:
    for verdict in record.gates:
        text = printable(f"`{verdict.gate}`: {verdict.text}")
        yield _Case("gates", verdict.gate, "" if verdict.passed else text, text if verdict.passed else "")


def _findings(record: RunRecord) -> Iterator[_Case]:
    for finding in record.findings:
        if finding.severity == "info" or finding.id == "gates-failed":  # each gate is a case of its own
            continue
        text = "\n".join(
            printable(part)
            for part in (
                finding.text,
                f"evidence: {finding.evidence}" if finding.evidence else "",
                f"hint: {finding.hint}" if finding.hint else "",
            )
            if part
        )
        failed = finding.severity == "error"
        yield _Case("findings", finding.id, text if failed else "", "" if failed else f"warning: {text}")


def _add_properties(suite: ET.Element, record: RunRecord, options: Options) -> None:
    facts = {
        "preset": level(record),
        "dtype": half_type(record) or "float32",
        "steps": str(record.steps.attempted),
        "skipped_steps": str(record.steps.skipped),
        "mpx": record.mpx,
        "torch": record.torch,
        "record": str(options.run_path) if options.run_path else None,
    }
    properties = ET.SubElement(suite, "properties")
    for name, value in facts.items():
        if value:
            ET.SubElement(properties, "property", {"name": name, "value": printable(value)})


def _add_case(suite: ET.Element, case: _Case, record: RunRecord) -> None:
    time = record.wall_s or 0.0 if case.group == "run" else 0.0
    attributes = {"classname": f"mpx.{case.group}", "name": printable(case.name), "time": f"{time:.3f}"}
    element = ET.SubElement(suite, "testcase", attributes)
    if case.failure:
        message, _, _ = case.failure.partition("\n")
        ET.SubElement(element, "failure", {"message": message, "type": case.group}).text = case.failure
    if case.output:
        ET.SubElement(element, "system-out").text = case.output
