"""The schema of `run.json`: every record fits it, and what is no record does not."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest

from mpx.record import RunRecord
from mpx.record.fold import fold
from mpx.record.schema import record_schema, record_schema_text
from mpx.record.shards import read_shard

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
RECORDS = sorted((GOLDEN / "records").glob("v*/*.json"))
VALIDATOR = jsonschema.Draft202012Validator(record_schema())


def problems(data) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(data)]


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(record_schema())


def test_the_file_in_the_documentation_is_up_to_date():
    assert (ROOT / "docs" / "run.schema.json").read_text(encoding="utf-8") == record_schema_text(), (
        "`make schemas` writes it anew"
    )


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_record_ever_written_fits(path):
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []


def test_what_is_folded_from_real_events_fits():
    for path in sorted((GOLDEN / "events").glob("*.jsonl")):
        assert problems(fold(read_shard(path)).to_dict()) == []
    assert problems(RunRecord().to_dict()) == []


def test_the_schema_knows_every_field_that_is_written():
    written, known = RunRecord().to_dict(), record_schema()["properties"]
    assert list(written) == list(known)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("steps", "attempted"), "three"),
        (("steps", "attempted"), 1.5),
        (("losses", 0, "value"), [None]),
        (("losses", 0, "value"), ["NaN"]),
        (("scalers", 0, "final"), None),
        (("findings",), {}),
        (("device",), "cpu"),
    ],
)
def test_what_does_not_fit_is_seen(path, value):
    data = copy.deepcopy(json.loads((RECORDS[0].parent / "normal.json").read_text(encoding="utf-8")))
    assert problems(data) == []
    *way, last = path
    place = data
    for step in way:
        place = place[step]
    place[last] = value
    assert problems(data) != []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", 1, 0.5])
def test_a_number_may_be_one_that_json_lacks(value):
    data = json.loads((RECORDS[0].parent / "normal.json").read_text(encoding="utf-8"))
    data["losses"][0]["value"][-1] = value
    assert problems(data) == []


def test_every_field_is_explained_in_the_documentation():
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8").partition("## `run.json`")[2]
    explained = {
        name
        for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert explained == set(RunRecord().to_dict())
