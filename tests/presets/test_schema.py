"""The schema for editors: it accepts what the loader accepts, and sees what a file's shape alone can tell."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from mpx.presets import resolve, show
from mpx.presets.policy import field_specs
from mpx.presets.schema import SCHEMA_FILE, preset_schema, preset_schema_text
from mpx.presets.shipped import configs_dir, preset_names

GOLDEN = Path(__file__).parent.parent / "golden" / "presets"
GOOD = [*sorted(configs_dir().glob("*.yaml")), *sorted(GOLDEN.glob("v*/*.yaml"))]
VALIDATOR = jsonschema.Draft7Validator(preset_schema())


def problems(text: str) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_the_schema_is_one():
    jsonschema.Draft7Validator.check_schema(preset_schema())


def test_the_shipped_file_is_up_to_date():
    assert (configs_dir() / SCHEMA_FILE).read_text(encoding="utf-8") == preset_schema_text(), (
        "`make schemas` writes it anew"
    )


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_preset_that_loads_fits(path):
    assert problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", preset_names())
def test_what_show_prints_fits(name, tmp_path):
    assert problems(show(resolve(name, overrides=[], cwd=tmp_path), origin=True)) == []


@pytest.mark.parametrize(
    "text",
    [
        "loss_scale: dynamic",
        "loss_scale: 128",
        "loss_scale: 2**16",
        "loss_scale: {init: 64Ki, growth_interval: 1e3}",
        "loss_scale.init: 128",
        "fp32_modules+: [LayerNorm]",
        "ops: {float32+: [softmax]}",
        "dtype: bf16",
        "keep_batchnorm_fp32: null",
        "gates: ['overflow_rate>5%', {expr: skipped_steps>2, after: 100}]",
        "abort_on: {expr: nonfinite_loss}",
    ],
)
def test_every_spelling_that_the_loader_knows_fits(text):
    assert problems(f"extends: O1\n{text}") == []


@pytest.mark.parametrize(
    "text",
    [
        "growth_interval: 5",
        "loss_scale: {growht_interval: 5}",
        "loss_scale: {growth_interval: 0}",
        "loss_scale: {init: -1}",
        "loss_scale: {backoff_factor: 1}",
        "loss_scale: sometimes",
        "dtype: float8",
        "fp32_modules: LayerNorm",
        "patch_torch_functions: maybe",
        "monitors: {losses: 3}",
        "schema: 99",
        "gates: nonfinite_loss",
        "gates: [{after: 100}]",
    ],
)
def test_what_the_shape_alone_can_tell_is_seen(text):
    assert problems(text) != []


def test_an_editor_shows_what_the_reference_preset_says():
    schema = preset_schema()["properties"]
    assert "6e-8 to 65504" in schema["dtype"]["description"]
    assert schema["flush_interval_s"]["description"].startswith("a killed run loses")
    assert "really needs" in json.dumps(schema["loss_scale"])


def test_every_key_of_a_policy_is_in_the_schema():
    text = json.dumps(preset_schema())
    assert all(f'"{key.rpartition(".")[2]}"' in text for key in field_specs())
