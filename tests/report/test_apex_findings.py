"""What the report says of a script that asks apex for a level."""

import pytest

from mpx.record import RunRecord
from mpx.record.parts import Substitution
from mpx.report import findings


@pytest.mark.parametrize(
    ("origin", "asked", "told"),
    [
        ("default", "O2", True),
        ("--opt-level", "O2", False),
        ("mpx.yaml:1", "O2", False),
        ("default", "options", False),
        ("default", "01", False),
    ],
)
def test_a_level_that_only_the_script_chose_is_told(origin, asked, told):
    rows = [Substitution(f"apex-asks-{asked}", "the script asks apex.amp for something else")]
    record = RunRecord(preset={"name": "O1"}, origin={"name": origin}, substitutions=rows)
    hints = [finding.hint for finding in findings(record) if finding.id == "apex-level"]
    assert hints == [f"`mpx run -O {asked} ...` runs what it asks for"] * told
