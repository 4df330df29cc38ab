import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mpx.cli.policy_options import policy_options, resolve_from_options
from mpx.cli.presets import presets
from mpx.errors import PresetError
from mpx.presets import list_presets, resolve, show
from mpx.presets.policy import field_specs


@pytest.fixture
def invoke(here, monkeypatch):
    monkeypatch.chdir(here)

    def invoke(*args, command=presets):
        return CliRunner().invoke(command, args)

    return invoke


@pytest.fixture
def options_of(invoke):
    """Parse as `mpx run` does, and return what it hands on."""

    def options_of(*args):
        seen = {}

        @click.command()
        @policy_options
        def command(**options):
            seen.update(options)

        result = invoke(*args, command=command)
        assert result.exit_code == 0, result.output
        return seen

    return options_of


def test_list_has_a_line_a_preset(invoke):
    result = invoke("list")
    assert result.exit_code == 0
    assert [line.split("  ")[0] for line in result.stdout.splitlines()] == [
        info.name for info in list_presets()
    ]


def test_show_prints_what_a_run_would_use(invoke, resolved):
    result = invoke("show", "O2", "--dtype", "bf16", "--set", "collapse.after=3")
    assert (result.exit_code, result.stderr) == (0, "")
    from mpx.presets import parse_set

    assert result.stdout == show(resolved("O2", parse_set("dtype=bf16"), parse_set("collapse.after=3")))


def test_show_origin_names_the_options_as_they_were_typed(invoke):
    result = invoke(
        "show", "O2", "--origin", "--no-master-weights", "--fp32-op", "softmax", "--on-collapse", "stop"
    )
    origins = dict(line.strip().split(" # ") for line in result.stdout.splitlines() if " # " in line)
    by_key = {line.partition(":")[0].strip(): origin for line, origin in origins.items()}
    assert by_key["master_weights"] == "--no-master-weights"
    assert by_key["user_float32"] == "--fp32-op"
    assert by_key["action"] == "--on-collapse"
    assert by_key["name"] == "the command line"


def test_show_tells_the_project_file_and_warnings_on_stderr_only(invoke, write, here):
    write("mpx.yaml", "extends: O2\nloss_scale: none\n")
    result = invoke("show")
    assert str(here / "mpx.yaml") in result.stderr
    assert "float16 without loss scaling" in result.stderr
    assert result.stdout.startswith("extends: O0\nschema: 1\nname: O2\n")


def test_show_of_what_is_wrong_raises_for_the_command_group_to_render(invoke):
    result = invoke("show", "O9")
    assert isinstance(result.exception, PresetError)
    assert result.exception.exit_code == 2
    assert result.stdout == ""


def test_validate_checks_every_file_and_fails_if_one_is_wrong(invoke, write):
    write("good.yaml", "extends: O1\n")
    write("bad.yaml", "extends: O1\ndtype: fp\n")
    result = invoke("validate", "bad.yaml", "good.yaml", "missing.yaml")
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0].startswith("bad.yaml:2:8  dtype: ")
    assert "good.yaml: ok" in result.stdout.splitlines()
    assert "missing.yaml  there is no such file" in result.stdout
    assert invoke("validate", "good.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["--dtype", "bf16"], "dtype", "bfloat16"),
        (["--loss-scale", "128"], "loss_scale.init", 128.0),
        (["--loss-scale", "dynamic"], "loss_scale.mode", "dynamic"),
        (["--keep-batchnorm-fp32"], "keep_batchnorm_fp32", True),
        (["--no-keep-batchnorm-fp32"], "keep_batchnorm_fp32", False),
        (["--master-weights"], "master_weights", True),
        (["--no-master-weights"], "master_weights", False),
        (["--fp32-op", "softmax", "--fp32-op", "gelu"], "ops.user_float32", ("softmax", "gelu")),
        (["--half-op", "softmax"], "ops.user_half", ("softmax",)),
        (["--fp32-module", "[ab]*", "--fp32-module", "LayerNorm"], "fp32_modules", ("[ab]*", "LayerNorm")),
        (["--script-amp", "keep"], "script_amp", "keep"),
        (["--apex", "off"], "apex", "off"),
        (["--on-collapse", "stop"], "collapse.action", "stop"),
        (["--set", "collapse.after=7"], "collapse.after", 7),
        (["--set", "fp32_modules+=LayerNorm"], "fp32_modules", ("LayerNorm",)),
    ],
)
def test_each_option_sets_its_key(args, key, value, options_of, here):
    result = resolve_from_options(options_of("-O", "O3", *args), here)
    assert result.policy.flat()[key] == value
    assert result.origin[key].startswith(args[0])


def test_no_option_changes_nothing(options_of, here):
    assert resolve_from_options(options_of(), here) == resolve(None, cwd=here)
    assert resolve_from_options(options_of("--opt-level", "O2"), here) == resolve("O2", cwd=here)


def test_options_that_are_not_ours_are_ignored(options_of, here):
    options = {**options_of("-O", "O1"), "out": "x", "quiet": 2}
    assert resolve_from_options(options, here) == resolve("O1", cwd=here)


def test_an_option_and_set_that_disagree_are_refused(options_of, here):
    with pytest.raises(PresetError, match="--dtype sets this to `float16` already"):
        resolve_from_options(options_of("--dtype", "fp16", "--set", "dtype=bf16"), here)


def test_ops_that_no_list_has_are_handed_on(options_of, here):
    result = resolve_from_options(options_of("--fp32-op", "my::op", "--half-op", "softmax"), here)
    assert result.unlisted_ops == ("my::op",)


def test_completion_offers_levels(invoke):
    from mpx.cli.policy_options import _complete_level

    offered = _complete_level(None, None, "O1")
    assert [item.value for item in offered] == ["O1", "O1-bf16"]


@pytest.mark.parametrize(
    "args", [["list"], ["show", "O2", "--origin", "--fp32-op", "softmax"], ["--help"], ["show", "--help"]]
)
def test_no_command_imports_torch(args, here):
    code = f"""
import sys
from mpx.cli.presets import presets
try:
    presets({args!r})
except SystemExit as end:
    assert not end.code
heavy = {{'torch', 'numpy', 'rich'}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_key_can_be_set_from_the_command_line(options_of, here):
    shown = resolve("O1", cwd=here).policy
    for key, value in shown.flat().items():
        from mpx.presets.spelling import show_value

        text = (
            "[" + ", ".join(f"'{entry}'" for entry in value) + "]"
            if isinstance(value, tuple)
            else show_value(value)
        )
        if isinstance(value, str) and text.startswith('"'):
            text = value
        result = resolve_from_options(options_of("--set", f"{key}={text}"), Path(here))
        assert result.policy == shown, key
        assert result.origin[key] == f"--set {key}"
    assert list(shown.flat()) == list(field_specs())
