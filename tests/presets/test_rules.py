import pytest

from mpx.presets import Override, parse_set


def sets(*texts):
    return [parse_set(text) for text in texts]


# What Apex refuses (its `Properties` raise RuntimeError), by level and override, and what leads out.
APEX_REFUSES = [
    ("O1", "cast_model_type=half", "cast_model_type", "`--opt-level O2`"),
    ("O0", "patch_torch_functions=true", "patch_torch_functions", "`--opt-level O1`"),
    ("O2", "patch_torch_functions=true", "patch_torch_functions", "`--opt-level O1`"),
    ("O3", "patch_torch_functions=true", "patch_torch_functions", "`--opt-level O1`"),
    ("O1", "keep_batchnorm_fp32=true", "keep_batchnorm_fp32", "`--fp32-module BatchNorm2d`"),
    ("O1", "keep_batchnorm_fp32=false", "keep_batchnorm_fp32", "`--opt-level O2`"),
    ("O1", "master_weights=true", "master_weights", "`--opt-level O2`"),
    ("O1", "master_weights=false", "master_weights", "`--opt-level O2`"),
]
# What the tree of values allows to write and means nothing.
CONTRADICTIONS = [
    ("O1", "cast_model_type=float32", "cast_model_type", "`--opt-level O1`"),
    ("O2", "keep_batchnorm_fp32=null", "keep_batchnorm_fp32", "`true` to keep it"),
    ("O3", "master_weights=null", "master_weights", "`true` to keep them"),
    ("O1", "loss_scale.min=2**30", "loss_scale.min", "at most `loss_scale.max`"),
    ("O1", "loss_scale.max=2**-20", "loss_scale.max", "at most `loss_scale.max`"),
    ("O1", "loss_scale.init=2**30", "loss_scale.init", "loss_scale.max=2**30"),
    ("O1", "loss_scale.init=2**-20", "loss_scale.init", "loss_scale.min=2**-20"),
    ("O1", "loss_scale=2**30", "loss_scale.init", "loss_scale.max=2**30"),
    ("O1", "ops.float32+=@matmul", "ops.float32", "take it out"),
]


@pytest.mark.parametrize(("level", "text", "key", "way_out"), APEX_REFUSES + CONTRADICTIONS)
def test_a_refused_combination_gives_its_reason_and_a_way_out(level, text, key, way_out, problems):
    (problem,) = problems(level, *sets(text))
    assert problem.key == key
    assert problem.where == "--set"
    assert way_out in problem.suggestion


@pytest.mark.parametrize(
    ("level", "texts"),
    [
        ("O0", ["keep_batchnorm_fp32=true"]),
        ("O0", ["master_weights=true"]),
        ("O1", ["patch_torch_functions=false"]),
        ("O2", ["keep_batchnorm_fp32=false"]),
        ("O2", ["master_weights=false"]),
        ("O2", ["keep_batchnorm_fp32=False", "loss_scale=128.0"]),
        ("O3", ["master_weights=true"]),
        ("O3", ["keep_batchnorm_fp32=true"]),
        ("O3", ["loss_scale=dynamic"]),
        ("O2", ["cast_model_type=float32"]),
        ("O1", ["loss_scale.init=2**30", "loss_scale.max=2**30"]),
        ("O1", ["loss_scale=none", "loss_scale.init=2**30"]),
    ],
)
def test_what_apex_allows_is_allowed(level, texts, resolved):
    resolved(level, *sets(*texts))


def test_a_refusal_points_to_who_had_the_last_word(write, problems):
    """A file that was right before an option came is not what is wrong."""
    path = write("team.yaml", "extends: O2\nmaster_weights: true\n")
    (problem,) = problems(
        path,
        Override("cast_model_type", "none", "=", "--cast"),
        Override("keep_batchnorm_fp32", None, "=", "--keep"),
    )
    assert (problem.where, problem.key) == ("--cast", "cast_model_type")
    (problem,) = problems(write("other.yaml", "extends: O1\nmaster_weights: true\n"))
    assert (problem.where, problem.key) == ("other.yaml:2:1", "master_weights")


@pytest.mark.parametrize(
    ("level", "texts", "warning"),
    [
        ("O1", ["loss_scale=1"], "float16 without loss scaling"),
        ("O2", ["loss_scale=none"], "float16 without loss scaling"),
        ("O1-bf16", ["loss_scale=dynamic"], "bfloat16 has the range of FP32"),
        ("O2-bf16", ["loss_scale=128"], "bfloat16 has the range of FP32"),
        ("O2", ["dtype=bfloat16", "loss_scale=dynamic"], "bfloat16 has the range of FP32"),
        ("O0", ["loss_scale=dynamic"], "everything runs in FP32"),
        ("O3", ["loss_scale=dynamic"], "without FP32 master weights"),
        ("O2", ["master_weights=false"], "without FP32 master weights"),
        ("O1", ["patch_torch_functions=false"], "nothing runs in half"),
        ("O0", ["ops.user_float32+=softmax"], "change nothing"),
        ("O0", ["fp32_modules+=LayerNorm"], "change nothing"),
        ("O0", ["ddp.comm_dtype=bf16"], "`ddp.comm_dtype` change nothing"),
        ("O2-bf16", ["ddp.comm_dtype=float16"], "exchanged in float16 without loss scaling"),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_warned_of(level, texts, warning, resolved):
    (text,) = resolved(level, *sets(*texts)).warnings
    assert warning in text


@pytest.mark.parametrize(
    ("level", "texts"),
    [
        ("O1", ["loss_scale=dynamic"]),
        ("O1", ["dtype=bfloat16"]),
        ("O1-bf16", ["dtype=float16"]),
        ("O3", []),
        ("O3", ["dtype=bfloat16"]),
        ("O3", ["ddp.comm_dtype=fp16"]),
        ("O1", ["ddp.comm_dtype=fp16"]),
        ("O2-bf16", ["ddp.comm_dtype=bf16"]),
        ("O0", ["ddp.comm_dtype=null"]),
        ("O3", ["master_weights=true", "loss_scale=dynamic"]),
        ("O1", ["ops.user_float32+=softmax", "fp32_modules+=LayerNorm"]),
    ],
)
def test_what_is_sound_is_not_warned_of(level, texts, resolved):
    assert resolved(level, *sets(*texts)).warnings == ()


def test_an_op_cannot_be_asked_for_in_both_types(problems):
    found = problems("O1", *sets("ops.user_float32+=softmax", "ops.user_half+=softmax"))
    assert [problem.key for problem in found] == ["ops.user_half"]
