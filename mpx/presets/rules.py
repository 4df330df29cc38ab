"""What values mean together: combinations that are refused with a reason and a way out, and those worth a warning.

A rule names the fields that it reads and is left out when one of them could not be read. What Apex refuses is
refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, TypeAlias

from mpx.presets.values import power_text
from mpx.values import frozen

__all__ = ["Refusal", "Warn", "judge"]


@frozen
class Refusal:
    """These fields cannot have these values together; `way_out` says what to do instead."""

    keys: tuple[str, ...]
    what: str
    way_out: str


@frozen
class Warn:
    """Allowed, and probably not what was meant."""

    text: str


Values: TypeAlias = Mapping[str, Any]
Judgement: TypeAlias = "Refusal | Warn"
_Rule: TypeAlias = Callable[[Values], Iterator[Judgement]]
_RULES: list[tuple[frozenset[str], _Rule]] = []


def judge(values: Values) -> Iterator[Judgement]:
    """Yield what is to be said about the values; keys that could not be read are absent."""
    for reads, rule in _RULES:
        if reads <= values.keys():
            yield from rule(values)


def _rule(*reads: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.append((frozenset(reads), rule))
        return rule

    return register


@_rule("cast_model_type", "patch_torch_functions")
def _one_way_to_choose_dtypes(values: Values) -> Iterator[Judgement]:
    cast = values["cast_model_type"]
    keys = ("patch_torch_functions", "cast_model_type")
    if not values["patch_torch_functions"]:
        if cast == "none":
            yield Warn(
                "nothing runs in half: neither weights (`cast_model_type`) nor operations (`patch_torch_functions`) "
                "are asked to"
            )
    elif cast == "half":
        yield Refusal(
            keys,
            "operations choose their dtype from FP32 weights (`patch_torch_functions: true`), and these weights are "
            "half (`cast_model_type: half`)",
            "use `--opt-level O1` for the first or `--opt-level O2` for the second, and leave both keys alone",
        )
    elif cast == "float32":
        yield Refusal(
            keys,
            "everything is to be FP32 (`cast_model_type: float32`), and operations are to choose half "
            "(`patch_torch_functions: true`)",
            "use `--opt-level O1`, where `cast_model_type` is `none` and weights are FP32 all the same",
        )


@_rule("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32")
def _batchnorm_of_a_cast_model(values: Values) -> Iterator[Judgement]:
    cast, keep = values["cast_model_type"], values["keep_batchnorm_fp32"]
    keys = ("keep_batchnorm_fp32", "cast_model_type")
    if cast == "none" and keep is not None:
        yield Refusal(
            keys,
            "no weight is cast at O1 (`cast_model_type: none`), so those of BatchNorm are FP32 whatever is said here",
            "leave it out, or use `--opt-level O2`; to compute BatchNorm in FP32 at O1, `--fp32-module BatchNorm2d`",
        )
    if cast == "half" and keep is None and not values["patch_torch_functions"]:
        yield Refusal(
            keys,
            "the model is cast to half, and nothing says whether BatchNorm is",
            "write `true` to keep it in FP32 (as O2) or `false` to cast it (as O3)",
        )


@_rule("cast_model_type", "patch_torch_functions", "master_weights")
def _masters_of_a_cast_model(values: Values) -> Iterator[Judgement]:
    cast, masters = values["cast_model_type"], values["master_weights"]
    keys = ("master_weights", "cast_model_type")
    if cast == "none" and masters is not None:
        yield Refusal(
            keys,
            "no weight is cast at O1 (`cast_model_type: none`), so the weights are their own FP32 masters whatever is "
            "said here",
            "leave it out, or use `--opt-level O2`, which has half weights and FP32 masters",
        )
    if cast == "half" and masters is None and not values["patch_torch_functions"]:
        yield Refusal(
            keys,
            "the model is cast to half, and nothing says whether FP32 master weights are kept",
            "write `true` to keep them (as O2) or `false` not to (as O3)",
        )


@_rule("loss_scale.mode", "loss_scale.init", "loss_scale.min", "loss_scale.max")
def _scale_within_bounds(values: Values) -> Iterator[Judgement]:
    init, low, high = (values[f"loss_scale.{name}"] for name in ("init", "min", "max"))
    if low > high:
        keys = ("loss_scale.min", "loss_scale.max")
        what = f"the floor of the scale ({power_text(low)}) is above its ceiling ({power_text(high)})"
        yield Refusal(keys, what, "give `loss_scale.min` at most `loss_scale.max`")
    elif values["loss_scale.mode"] != "none" and not low <= init <= high:
        edge = "max" if init > high else "min"
        keys = ("loss_scale.init", f"loss_scale.{edge}")
        side = (
            f"above its ceiling ({power_text(high)})"
            if init > high
            else f"below its floor ({power_text(low)})"
        )
        what = f"the scale begins {side}, at {power_text(init)}"
        yield Refusal(keys, what, f"move the bound as well: `--set loss_scale.{edge}={power_text(init)}`")


@_rule("ops.half", "ops.float32", "ops.promote", "ops.native")
def _one_list_an_op(values: Values) -> Iterator[Judgement]:
    yield from _shared_entries(values, ("ops.half", "ops.float32", "ops.promote", "ops.native"))


@_rule("ops.user_float32", "ops.user_half")
def _one_user_list_an_op(values: Values) -> Iterator[Judgement]:
    yield from _shared_entries(values, ("ops.user_float32", "ops.user_half"))


def _shared_entries(values: Values, lists: tuple[str, ...]) -> Iterator[Judgement]:
    for first, second in combinations(lists, 2):
        for entry in values[first]:
            if entry in values[second]:
                what = f"`{entry}` is in both `{first}` and `{second}`"
                yield Refusal((second, first), what, "take it out of one of them")


@_rule("dtype", "cast_model_type", "patch_torch_functions", "master_weights", "loss_scale.mode")
def _scale_that_fits_the_dtype(values: Values) -> Iterator[Judgement]:
    cast, masters = values["cast_model_type"], values["master_weights"]
    scaled = values["loss_scale.mode"] != "none"
    if cast == "float32" or (cast == "none" and not values["patch_torch_functions"]):
        if scaled:
            yield Warn("everything runs in FP32, so the loss scale gains nothing")
    elif values["dtype"] == "bfloat16":
        if scaled:
            yield Warn(
                "bfloat16 has the range of FP32, so the loss scale gains nothing; leave it out, or use "
                "`--dtype float16`"
            )
    elif not scaled and (cast == "none" or masters):
        yield Warn(
            "float16 without loss scaling: gradients below 3e-8 become 0; use `--loss-scale dynamic`, or "
            "`--dtype bfloat16`"
        )
    elif scaled and cast == "half" and not masters:
        yield Warn(
            "without FP32 master weights gradients end in float16, so those that the loss scale saved become 0 again "
            "when it is taken out; use `--opt-level O2`"
        )


@_rule("cast_model_type", "master_weights", "ddp.comm_dtype", "loss_scale.mode")
def _gradients_sent_in_half(values: Values) -> Iterator[Judgement]:
    """Without FP32 gradients (O3) the question does not arise."""
    in_float32 = values["cast_model_type"] == "none" or values["master_weights"]
    if in_float32 and values["ddp.comm_dtype"] == "float16" and values["loss_scale.mode"] == "none":
        yield Warn(
            "gradients are exchanged in float16 without loss scaling: those below 3e-8 become 0 and those above "
            "65504 infinite; use `ddp.comm_dtype: bfloat16`"
        )


_OF_HALF = ("ops.user_float32", "ops.user_half", "fp32_modules", "ddp.comm_dtype")


@_rule("cast_model_type", *_OF_HALF)
def _rules_without_half(values: Values) -> Iterator[Judgement]:
    if values["cast_model_type"] != "float32":
        return
    asked = [key for key in _OF_HALF if values[key]]
    if asked:
        listed = " and ".join(f"`{key}`" for key in asked)
        yield Warn(f"{listed} change nothing, because everything runs in FP32; use `--opt-level O1` or `O2`")
