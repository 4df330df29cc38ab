import re
from itertools import product

import pytest

from mpx.errors import PresetError
from mpx.presets import Override, list_presets, parse_set, resolve, show, validate
from mpx.presets.files import configs_dir
from mpx.presets.policy import field_specs

LEVELS = [info.name for info in list_presets()]
KEY = "collapse.after"


def test_without_any_choice_a_run_is_o1_and_says_so(resolved):
    result = resolved(None)
    assert result.policy == resolved("O1").policy
    assert result.origin["name"] == "default"
    assert result.project_file is None


@pytest.mark.parametrize("sources", list(product([False, True], repeat=4)), ids=str)
def test_the_strongest_source_wins_and_is_the_origin(sources, write, here):
    """Built-in < extends chain < project file < preset file < options, for every subset of them."""
    base, project, file, option = sources

    def setting(number, *, present):
        return f"{KEY}: {number}\n" if present else ""

    write("base.yaml", "extends: O1\n" + setting(101, present=base))
    write("file.yaml", "extends: base.yaml\n" + setting(103, present=file))
    write("mpx.yaml", "script_amp: keep\n" + setting(102, present=project))
    result = resolve("file.yaml", overrides=[parse_set(f"{KEY}=104")] if option else [], cwd=here)

    expected = (None, "configs/O0.yaml")
    for present, value, origin in (
        (base, 101, "base.yaml:2"),
        (project, 102, "mpx.yaml:2"),
        (file, 103, "file.yaml:2"),
        (option, 104, f"--set {KEY}"),
    ):
        if present:
            expected = (value, origin)
    built_in = resolve("O1", cwd=here / "nowhere").policy.collapse.after
    assert result.policy.collapse.after == (expected[0] or built_in)
    assert result.origin[KEY].startswith(expected[1])
    assert result.policy.script_amp == "keep"


@pytest.mark.parametrize("level", LEVELS)
def test_every_value_has_an_origin_that_leads_to_it(level, resolved):
    result = resolved(level)
    assert list(result.origin) == list(field_specs())
    for key, origin in result.origin.items():
        if match := re.fullmatch(r"configs/(.+\.yaml):(\d+)", origin):
            line = (configs_dir() / match[1]).read_text().splitlines()[int(match[2]) - 1]
            assert line.strip().startswith(key.rpartition(".")[2] + ":"), (key, origin, line)
        else:
            assert (key, origin) in {("name", "--opt-level"), ("loss_scale.mode", "derived from dtype")}


def test_a_name_is_where_the_level_was_chosen(write, here):
    path = write("team.yaml", "extends: O1\n")
    assert resolve(path, cwd=here).origin["name"] == "--opt-level"
    write("mpx.yaml", "# ours\nextends: O2\n")
    assert resolve(None, cwd=here).origin["name"] == "mpx.yaml:2"
    assert resolve("O1", overrides=[parse_set("name=mine")], cwd=here).origin["name"] == "--set name"


def test_a_file_is_called_after_itself_unless_it_has_a_name(write, resolved):
    """The name of what it extends would be a lie in every report."""
    assert resolved(write("team.yaml", "extends: O1\n")).policy.name == "team"
    assert resolved(write("team.yaml", "extends: O1\n")).policy.description == ""
    assert resolved(write("team.yaml", "extends: O1\nname: ours\n")).policy.name == "ours"


def test_files_extend_each_other_from_where_they_are(write, resolved):
    write("shared/base.yaml", "extends: levels/deep.yaml\n")
    write("shared/levels/deep.yaml", "extends: O2\nflush_interval_s: 7\n")
    result = resolved(write("team.yaml", "extends: shared/base.yaml\n"))
    assert result.policy.cast_model_type == "half"
    assert result.origin["flush_interval_s"] == "shared/levels/deep.yaml:2"


def test_a_preset_outside_the_folder_is_shown_with_its_whole_path(write, here):
    write("elsewhere/team.yaml", "extends: O1\nflush_interval_s: 7\n")
    (here / "work").mkdir()
    result = resolve("../elsewhere/team.yaml", cwd=here / "work")
    assert result.origin["flush_interval_s"] == f"{here.resolve()}/elsewhere/team.yaml:2"


def test_a_level_replaces_the_preset_of_the_project_and_never_merges_over_it(write, resolved):
    write("mpx.yaml", "extends: O2\nname: ours\nflush_interval_s: 7\n")
    assert resolved(None).policy.master_weights is True
    chosen = resolved("O1").policy
    assert (chosen.name, chosen.master_weights) == ("O1", None)
    assert chosen.flush_interval_s == 7, "the project's own settings stay"


def test_a_file_stands_above_the_project_with_its_own_lines_only(write, resolved):
    write("mpx.yaml", "flush_interval_s: 7\ncollapse: {after: 9}\n")
    result = resolved(write("team.yaml", "extends: O1\ncollapse: {after: 8}\n"))
    assert (result.policy.flush_interval_s, result.policy.collapse.after) == (7, 8)


def test_a_project_that_changes_what_a_chosen_level_is_gets_told(write, resolved):
    write("mpx.yaml", "dtype: bf16\nflush_interval_s: 7\n")
    assert resolved("O1").warnings == ("`mpx.yaml:1` sets `dtype` to `bfloat16`, where `O1` has `float16`",)
    assert resolved("O1-bf16").warnings == (), "it changes nothing there"
    assert resolved(None).warnings == (), "the project's own choice is no surprise"
    assert resolved("O1", Override("dtype", "fp16", "=", "--dtype")).warnings == (), (
        "the last word was another's"
    )


@pytest.mark.parametrize(
    ("level", "dtype", "mode", "origin"),
    [
        ("O1", "float16", "dynamic", "derived from dtype"),
        ("O1", "bfloat16", "none", "derived from dtype"),
        ("O0", "float16", "none", "derived from cast_model_type"),
    ],
)
def test_auto_is_decided_by_what_runs_in_half(level, dtype, mode, origin, resolved):
    result = resolved(level, parse_set("loss_scale=auto"), parse_set(f"dtype={dtype}"))
    assert result.policy.loss_scale.mode == mode
    assert result.origin["loss_scale.mode"] == origin


@pytest.mark.parametrize(
    ("text", "mode", "init"),
    [("dynamic", "dynamic", 65536), ("128", "static", 128), ("2**10", "static", 1024), ("1", "none", 65536),
     ("1.0", "none", 65536), ("none", "none", 65536)],
)  # fmt: skip
def test_the_short_form_of_a_loss_scale_is_apex_s(text, mode, init, write, resolved):
    by_option = resolved("O2", Override("loss_scale", text, "=", "--loss-scale"))
    by_file = resolved(write("team.yaml", f"extends: O2\nloss_scale: {text}\n"))
    assert by_option.policy.loss_scale == by_file.policy.loss_scale
    assert (by_option.policy.loss_scale.mode, by_option.policy.loss_scale.init) == (mode, init)
    assert by_option.origin["loss_scale.mode"] == "--loss-scale"


def test_a_list_is_replaced_or_added_to(write, resolved):
    base = write("base.yaml", "extends: O1\nfp32_modules: [A]\n")
    assert resolved(base).policy.fp32_modules == ("A",)
    more = resolved(
        write("more.yaml", "extends: base.yaml\nfp32_modules+: [B]\n"), parse_set("fp32_modules+=C")
    )
    assert more.policy.fp32_modules == ("A", "B", "C")
    assert more.origin["fp32_modules"] == "base.yaml:2 + more.yaml:2 + --set fp32_modules"
    other = resolved(write("other.yaml", "extends: base.yaml\nfp32_modules: [B]\n"))
    assert (other.policy.fp32_modules, other.origin["fp32_modules"]) == (("B",), "other.yaml:2")


def test_a_dotted_key_is_a_nested_key(write, resolved):
    dotted = resolved(write("a.yaml", "extends: O1\nname: x\nloss_scale.init: 1024\n"))
    nested = resolved(write("b.yaml", "extends: O1\nname: x\nloss_scale: {init: 1024}\n"))
    assert dotted.policy == nested.policy


def test_a_file_without_extends_must_be_complete(write, problems, resolved):
    (problem,) = problems(write("part.yaml", "dtype: bfloat16\n"))
    assert "`cast_model_type`" in problem.what
    assert "`dtype`" not in problem.what
    assert problem.suggestion == "add a line `extends: O1`"
    text = show(resolved("O1")).replace("extends: O0\n", "")
    assert resolved(write("whole.yaml", text)).policy == resolved("O1").policy


def test_a_value_that_was_given_wrongly_is_not_also_missing(write, problems, resolved):
    text = show(resolved("O1")).replace("extends: O0\n", "").replace("dtype: float16", "dtype: float61")
    (problem,) = problems(write("whole.yaml", text))
    assert problem.key == "dtype"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_cycle_is_told_with_its_chain(length, write, problems):
    names = [f"p{n}.yaml" for n in range(length)]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        write(name, f"extends: ./{following}\n")
    (problem,) = problems("./p0.yaml")
    assert " → ".join([*names, names[0]]) in problem.what
    assert problem.where == f"{names[-1]}:1:10"


def test_a_cycle_that_is_entered_from_outside_shows_only_itself(write, problems):
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: a.yaml\n")
    (problem,) = problems(write("start.yaml", "extends: a.yaml\n"))
    assert "comes back to where it was: a.yaml → b.yaml → a.yaml" in problem.what


def test_a_file_may_extend_the_level_that_it_is_named_after(write, resolved):
    assert resolved(write("O1.yaml", "extends: O1\nflush_interval_s: 7\n")).policy.flush_interval_s == 7


@pytest.mark.parametrize(
    "reference", ["O4", "o1", "02", "fp16", "", "x" * 5000, "a\0b", "missing.yaml", "x" * 5000 + ".yaml"]
)
def test_a_preset_that_is_not_there_is_refused_with_those_that_are(reference, problems):
    (problem,) = problems(reference)
    assert problem.where == "--opt-level"
    assert all(f"`{level}`" in problem.expected for level in LEVELS)


@pytest.mark.parametrize(
    ("reference", "meant"), [("o1", "O1"), ("02", "O2"), ("O1-bf61", "O1-bf16"), ("O1bf16", "O1-bf16")]
)
def test_a_misspelt_level_is_told_the_nearest(reference, meant, problems):
    (problem,) = problems(reference)
    assert problem.suggestion.startswith(f"did you mean `{meant}`?")


def test_a_zero_for_the_letter_o_is_explained(problems):
    (problem,) = problems("01")
    assert "the letter O, not with a zero" in problem.suggestion


def test_a_misspelt_file_is_told_the_nearest(write, problems):
    write("conf/team.yaml", "extends: O1\n")
    (problem,) = problems("conf/taem.yaml")
    assert problem.suggestion == "did you mean `conf/team.yaml`?"


def test_of_a_file_that_is_not_there_it_is_told_where_it_was_looked_for(tmp_path, problems):
    (file,), (folder,) = problems("absent.yaml"), problems("conf/absent.yaml")
    assert file.what == f"there is no such file in `{tmp_path}`"
    assert folder.what == f"there is no folder `{tmp_path / 'conf'}`"
    assert file.suggestion is folder.suggestion is None  # no level is what was meant


def test_a_file_without_a_suffix_is_named_by_a_path(write, problems, resolved):
    write("mine", "extends: O1\n")
    (problem,) = problems("mine")
    assert problem.suggestion == "to use the file, write `./mine`"
    assert resolved("./mine").policy.name == "mine"


def test_all_problems_of_all_files_and_options_come_at_once_and_in_order(write, problems):
    write("base.yaml", "extends: O1\ndtype: fp\nmonitors: {losses: 3}\n")
    write("mpx.yaml", "collapse: {action: strop}\n")
    path = write("team.yaml", "extends: base.yaml\nfp32_modules: 3\n")
    found = problems(path, parse_set("flush_interval_s=0"), parse_set("nope=1"))
    assert [problem.where for problem in found] == [
        "base.yaml:2:8", "base.yaml:3:20", "mpx.yaml:1:20", "team.yaml:2:15", "--set", "--set",
    ]  # fmt: skip


def test_problems_of_a_file_and_of_values_that_do_not_fit_come_together(write, problems):
    path = write("team.yaml", "extends: O1\nmaster_weights: true\nmonitors: {losses: off}\n")
    assert [problem.key for problem in problems(path)] == ["master_weights", "monitors.losses"]


def test_a_rule_about_a_value_that_could_not_be_read_says_nothing(write, problems):
    path = write("team.yaml", "extends: O1\nmaster_weights: true\ncast_model_type: halve\n")
    assert [problem.key for problem in problems(path)] == ["cast_model_type"]


def test_validate_says_what_resolve_says(write, here):
    write("good.yaml", "extends: O2\n")
    write("bad.yaml", "extends: O2\ndtype: 1\nloss_scale: {init: 3}\n")
    assert validate(here / "good.yaml", cwd=here) == []
    found = validate(here / "bad.yaml", cwd=here)
    with pytest.raises(PresetError) as caught:
        resolve("./bad.yaml", cwd=here)
    assert list(caught.value.problems) == found
    assert [problem.where for problem in found] == ["bad.yaml:2:8", "bad.yaml:3:20"]


def test_validate_takes_a_file_alone(write, here):
    write("mpx.yaml", "dtype: nonsense\n")
    write("good.yaml", "extends: O2\n")
    assert validate(here / "good.yaml", cwd=here) == []
    assert [problem.key for problem in validate(here / "mpx.yaml", cwd=here)] == ["dtype"]
    assert [problem.what for problem in validate(here / "nothing.yaml", cwd=here)] == [
        "there is no such file"
    ]
