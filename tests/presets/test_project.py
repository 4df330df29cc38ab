import sys

import pytest

from mpx.presets import Override, resolve, validate

TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read TOML")


def folder(here, *parts):
    path = here.joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_the_nearest_project_file_upward_is_used_alone(write, here):
    write("mpx.yaml", "flush_interval_s: 7\ncollapse: {after: 9}\n")
    write("a/mpx.yaml", "flush_interval_s: 8\n")
    result = resolve(None, cwd=folder(here, "a", "b"))
    assert result.project_file == here / "a" / "mpx.yaml"
    assert result.policy.flush_interval_s == 8
    assert result.origin["collapse.after"].startswith("configs/"), "files of the same kind are not merged"


def test_nothing_above_the_root_of_the_repository_is_used(write, here):
    write("mpx.yaml", "flush_interval_s: 7\n")
    (folder(here, "inner", "deep").parent / ".git").write_text("gitdir: elsewhere\n")  # as in a worktree
    assert resolve(None, cwd=here / "inner" / "deep").project_file is None


def test_the_root_itself_is_searched(write, here):
    write("mpx.yaml", "flush_interval_s: 7\n")
    assert resolve(None, cwd=folder(here, "a", "b")).project_file == here / "mpx.yaml"


def test_without_a_repository_only_the_current_folder_counts(tmp_path):
    """A stray file in a home or temporary folder must not change what a run computes."""
    (tmp_path / "mpx.yaml").write_text("flush_interval_s: 7\n")
    assert resolve(None, cwd=folder(tmp_path, "a")).project_file is None
    assert resolve(None, cwd=tmp_path).project_file == tmp_path / "mpx.yaml"


def test_a_home_folder_is_never_looked_into(here, tmp_path, monkeypatch):
    home = folder(tmp_path, "home")
    for name in ("mpx.yaml", ".mpx.yaml", ".config/mpx/mpx.yaml"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("flush_interval_s: 7\n")
    monkeypatch.setenv("HOME", str(home))
    assert resolve(None, cwd=folder(here, "work")).project_file is None


def test_a_project_extends_from_where_it_is(write, here):
    write("conf/team.yaml", "extends: O2\n")
    write("mpx.yaml", "extends: conf/team.yaml\n")
    result = resolve(None, cwd=folder(here, "a"))
    assert result.policy.name == "team"
    assert result.policy.master_weights is True


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("extends: O9\n", "mpx.yaml:1:10", "no such preset"),
        ("extends: mpx.yaml\n", "mpx.yaml:1:10", "comes back to where it was: mpx.yaml → mpx.yaml"),
        ("flush_interval_s: 0\n", "mpx.yaml:1:19", "out of range"),
        ("- a\n", "mpx.yaml:1:1", "holds a list"),
        ("a: b: c\n", "mpx.yaml:1:5", "not valid YAML"),
    ],
)
def test_a_project_file_that_is_wrong_stops_every_run(text, where, what, write, problems):
    write("mpx.yaml", text)
    (problem,) = problems(None)
    assert problem.where == where
    assert what in problem.what


def test_a_project_file_that_does_not_fit_the_chosen_level_is_named(write, problems):
    write("mpx.yaml", "extends: O2\nkeep_batchnorm_fp32: false\n")
    (problem,) = problems("O1")
    assert problem.where == "mpx.yaml:2:1"


PYPROJECT = """\
[project]
name = "theirs"

[tool.mpx]
extends = "O2"
fp32_modules = ["A", "B"]
script_amp = "keep"   # a comment

[tool.mpx.loss_scale]
init = 1024.0
growth_interval = 10
max = "2**20"

[tool.other]
init = 3
"""


@TOML
def test_a_section_of_pyproject_is_a_project_file(write, here):
    write("pyproject.toml", PYPROJECT)
    result = resolve(None, cwd=here)
    policy, origin = result.policy, result.origin
    assert result.project_file == here / "pyproject.toml"
    assert (policy.fp32_modules, policy.script_amp) == (("A", "B"), "keep")
    assert (policy.loss_scale.init, policy.loss_scale.growth_interval, policy.loss_scale.max) == (
        1024,
        10,
        2**20,
    )
    assert (origin["name"], origin["loss_scale.init"]) == ("pyproject.toml:5", "pyproject.toml:10")


@TOML
def test_a_mistake_in_pyproject_is_told_by_line(write, problems):
    write(
        "pyproject.toml", PYPROJECT.replace("1024.0", "1000.0").replace("growth_interval", "growht_interval")
    )
    assert [(problem.where, problem.key) for problem in problems(None)] == [
        ("pyproject.toml:10:1", "loss_scale.init"),
        ("pyproject.toml:11:1", "loss_scale.growht_interval"),
    ]


@TOML
@pytest.mark.parametrize("text", ['tool.mpx = {dtype = "fp"}\n', '["tool"."mpx"]\ndtype = "fp"\n'])
def test_a_key_in_an_unusual_spelling_is_read_and_told_without_a_line(text, write, problems):
    write("pyproject.toml", text)
    (problem,) = problems(None)
    assert (problem.where, problem.key) == ("pyproject.toml [tool.mpx]", "dtype")


@TOML
@pytest.mark.parametrize("text", ['[tool]\nmpx.dtype = "fp"\n', '[ tool.mpx ] # ours\ndtype="fp"\n'])
def test_a_key_in_a_usual_spelling_is_told_with_its_line(text, write, problems):
    write("pyproject.toml", text)
    (problem,) = problems(None)
    assert (problem.where, problem.key) == ("pyproject.toml:2:1", "dtype")


@TOML
@pytest.mark.parametrize("value", ["3", '"O1"', "[]"])
def test_a_section_that_is_no_table_is_refused(value, write, problems):
    write("pyproject.toml", f"[tool]\nmpx = {value}\n")
    (problem,) = problems(None)
    assert "not a table" in problem.what


@pytest.mark.parametrize(
    "content",
    [
        b"[project]\nname = 'x'\n",
        b"not toml at all [",
        b"\xff\xfe",
        b"[tool.other]\nx = 1\n",
        b"# mpx\n",
        b"tool = 3 # mpx\n",
    ],
)
def test_a_pyproject_without_our_section_is_none_of_our_business(content, here):
    (here / "pyproject.toml").write_bytes(content)
    result = resolve(None, cwd=here)
    assert (result.project_file, result.warnings) == (None, ())


@TOML
def test_a_broken_pyproject_that_speaks_of_mpx_is_refused(write, problems):
    write("pyproject.toml", "[tool.mpx\n")
    (problem,) = problems(None)
    assert "not valid TOML" in problem.what


@TOML
def test_mpx_yaml_goes_before_pyproject_beside_it_and_says_so(write, here):
    write("pyproject.toml", PYPROJECT)
    write("mpx.yaml", "flush_interval_s: 7\n")
    result = resolve(None, cwd=here)
    assert result.project_file == here / "mpx.yaml"
    assert result.policy.script_amp == "takeover"
    assert result.warnings == (
        "`[tool.mpx]` in `pyproject.toml` is not used, because `mpx.yaml` is beside it",
    )


def test_python_3_10_says_that_it_does_not_use_the_section(write, here, monkeypatch):
    write("pyproject.toml", PYPROJECT)
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    result = resolve(None, cwd=here)
    monkeypatch.undo()
    assert result.project_file is None
    assert result.policy.script_amp == "takeover"
    (warning,) = result.warnings
    assert "Python 3.10 cannot read TOML" in warning
    assert "`mpx.yaml`" in warning


@TOML
def test_validate_reads_the_section_of_a_pyproject(write, here):
    write("pyproject.toml", PYPROJECT)
    assert validate(here / "pyproject.toml", cwd=here) == []
    write("pyproject.toml", "[project]\n")
    (problem,) = validate(here / "pyproject.toml", cwd=here)
    assert "no section `[tool.mpx]`" in problem.what


def test_a_project_and_options_add_to_the_same_list(write, resolved):
    write("mpx.yaml", "fp32_modules+: [A]\n")
    result = resolved("O1", Override("fp32_modules", ["B"], "+=", "--fp32-module"))
    assert result.policy.fp32_modules == ("A", "B")
    assert result.origin["fp32_modules"] == "mpx.yaml:1 + --fp32-module"
