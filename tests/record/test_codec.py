"""JSON in both directions: strict, complete, and clear about what does not fit."""

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx.errors import RecordError
from mpx.record import RunRecord, codec
from mpx.record.parts import Scaler

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
trees = st.dictionaries(st.text(), json_values, max_size=3)
records = st.builds(RunRecord, schema=st.just(RunRecord.SCHEMA), preset=trees, casts=trees)


@dataclass(frozen=True)
class Inner:
    number: float
    name: str = "x"


@dataclass(frozen=True)
class Outer:
    inner: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)
    flag: bool = False


@given(records)
def test_every_record_comes_back_from_its_json(record):
    text = record.to_json()
    assert RunRecord.from_dict(json.loads(text)).to_json() == text


@given(records)
def test_the_json_is_strict(record):
    def refuse(constant):
        raise AssertionError(constant)

    json.loads(record.to_json(), parse_constant=refuse)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_numbers_survive(value):
    scaler = Scaler(site="", final=value, min=1.0, max=1.0, init=1.0)
    back = codec.from_json(Scaler, json.loads(codec.dumps(scaler)))
    assert repr(back.final) == repr(value)


def test_scalars_of_array_libraries_become_numbers():
    numpy = pytest.importorskip("numpy")
    assert codec.plain({"a": numpy.float32(0.5), "b": numpy.int64(3), "c": numpy.array(2.0)}) == {
        "a": 0.5,
        "b": 3,
        "c": 2.0,
    }


def test_what_json_cannot_hold_becomes_text():
    assert codec.plain({1: object, "s": {2}}) == {"1": "<class 'object'>", "s": [2]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"number": "one"}}, "`inner.number` does not fit. Expected a number. Received: 'one'"),
        ({"inner": {}}, "`inner.number` is missing"),
        ({"many": [{"number": 1}, {"number": True}]}, "`many[1].number` does not fit"),
        ({"named": {"a": 1.5}}, "`named.a` does not fit. Expected a whole number"),
        ({"many": {}}, "`many` does not fit. Expected a list"),
        ({"named": []}, "`named` does not fit. Expected an object"),
        ({"flag": 1}, "`flag` does not fit. Expected true or false"),
        ([], "`Outer` does not fit. Expected an object"),
    ],
)
def test_a_misfit_names_its_place(data, message):
    with pytest.raises(RecordError) as caught:
        codec.from_json(Outer, data)
    assert message in caught.value.message


def test_a_lenient_reader_keeps_what_fits():
    found = []
    data = {"inner": {"number": 1, "name": 5}, "many": 3, "named": {"a": 1}, "later": "?"}
    outer = codec.from_json(Outer, data, on_error=found.append)
    assert outer == Outer(inner=Inner(1.0), named={"a": 1})
    assert [error.message.split()[0] for error in found] == ["`inner.name`", "`many`"]


@pytest.mark.parametrize(
    ("data", "message"),
    [({}, "no `schema`"), ([], "no `schema`"), ({"schema": 99}, "schema 99. Expected at most 1")],
)
def test_what_is_no_record_of_ours_is_refused(data, message):
    with pytest.raises(RecordError) as caught:
        RunRecord.from_dict(data)
    assert message in caught.value.message


def test_the_names_that_tools_parse_are_there():
    data = RunRecord().to_dict()
    names = """schema mpx torch python device command script preset origin exit_code status started wall_s
        processes forwards backwards steps scalers overflows losses throughput memory coverage casts
        substitutions findings optimizers nonfinite_losses faults notices"""
    assert set(names.split()) <= set(data)
    assert set(data["steps"]) == {"attempted", "applied", "skipped"}
