"""Runs of a comparison: in turn, each with a folder of its own."""

from mpx.launch.trials import Plan, turns


def test_levels_take_turns(tmp_path):
    plan = Plan(("O0", "O1", "my/own.yaml"), 2, ("train.py",), 100, tmp_path)
    planned = list(turns(plan))
    assert [turn.level for turn in planned] == ["O0", "O1", "my/own.yaml"] * 2
    assert [turn.record.name for turn in planned[2:4]] == ["1-3-own", "2-1-O0"]
    places = {path for turn in planned for path in (turn.record, turn.stdout, turn.stderr)}
    assert len(places) == 3 * len(planned)
    assert {path.parent for path in places} == {tmp_path}
