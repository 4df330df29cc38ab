"""`initialize`, and the state that goes into checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from mpx.apex.running import session

from ._amp_state import _amp_state, properties

__all__ = ["initialize", "load_state_dict", "state_dict"]

KEY = "loss_scaler"
# What some scripts call or set on an optimizer of apex's, around its lazy copies of the weights.
PREPARATIONS = ("_amp_lazy_init", "_lazy_init_maybe_master_weights", "_master_params_to_model_params")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: Any = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Return what was given, in the shape that it was given in; tell where the run does not do what is asked."""
    _amp_state.verbosity = verbosity
    _amp_state.scalers_for(num_losses)
    running = _amp_state.opt_properties = properties(enabled=enabled)
    if enabled:
        asked = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        }
        _compare(opt_level, {name: value for name, value in asked.items() if value is not None}, running)
    else:
        session().tell("apex-disabled", "the script's amp is off by a flag of its own: the level is computed")
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        _mark(optimizer)
    return models if optimizers is None else (models, optimizers)


def _compare(opt_level: str, asked: Mapping[str, Any], running: SimpleNamespace) -> None:
    """Tell what the script asks for and does not get: the policy of a run is fixed before the script starts."""
    others = {name: value for name, value in asked.items() if _word(value) != _word(running.options[name])}
    if opt_level == running.opt_level and not others:
        return
    wants = opt_level + "".join(f", {name}={value}" for name, value in others.items())
    gets = running.opt_level + "".join(
        f", {name}={running.options[name]}" for name in others if running.options[name] is not None
    )
    which = "options" if opt_level == running.opt_level else opt_level
    session().tell(f"apex-asks-{which}", f"the script asks apex.amp for {wants}: the run is at {gets}")


def _word(value: Any) -> str:
    """Return an option as a word: scripts give booleans and numbers as text too."""
    try:
        return str(float(str(value)))
    except ValueError:
        return str(value)


def _mark(optimizer: Any) -> None:
    """Give an optimizer what scripts look for to know that amp is on: the working copies are mpx's business."""
    if optimizer is None or hasattr(optimizer, "_amp_stash"):
        return
    optimizer._amp_stash = SimpleNamespace(
        lazy_init_called=True, already_patched=True, params_have_scaled_gradients=False
    )
    for name in PREPARATIONS:
        setattr(optimizer, name, _nothing)


def _nothing() -> None:
    """Stand in for a preparation that is not needed."""


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 17}, ...}`, as apex does."""
    state: dict[str, Any] = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        state[f"{KEY}{number}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return state


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take over the scales of a checkpoint, of apex's or of ours, in their order.

    Raises:
        RuntimeError: It holds something else.
    """
    others = [key for key in state_dict if KEY not in key]
    if others:
        raise RuntimeError(f"unexpected keys in amp's state: {others}. Expected {KEY}0, {KEY}1, ...")
    here = len(_amp_state.loss_scalers)
    if len(state_dict) != here:
        text = f"amp's state in the checkpoint has {len(state_dict)} loss scalers, the script has {here}"
        session().tell("apex-loss-scalers", text)
    for scaler, state in zip(_amp_state.loss_scalers, state_dict.values(), strict=False):
        scaler.restore(dict(_plain(state)))


def _plain(state: Mapping[str, Any]) -> Iterator[tuple[str, float | int]]:
    yield "scale", float(state["loss_scale"])
    yield "clean", int(state["unskipped"])
