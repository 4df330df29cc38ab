"""FSDP2: `fully_shard` keeps FP32 shards and can make the half copies itself, so at O2 it is told to.

Its copies are gathered in the half type, which halves that traffic; copies of ours would have to be made of what it has
gathered in FP32. Gradients are reduced in FP32, as under DDP. Inputs are not cast, as O2 casts none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mpx.engine.devices import HALF

if TYPE_CHECKING:
    from torch import nn

    from mpx.engine.kernels import Report
    from mpx.presets.policy import Policy

__all__ = ["wrap_fully_shard"]


def wrap_fully_shard(
    original: Callable[..., Any],
    policy: Policy,
    *,
    before: Callable[[nn.Module], None],
    sharded: Callable[[nn.Module], None],
    report: Report,
) -> Callable[..., Any]:
    """Return the `fully_shard` of the session.

    Args:
        original: torch's.
        policy: The level.
        before: Told of each module that is to be sharded.
        sharded: Told of each module that was sharded.
        report: Tells substitutions.
    """

    @wraps(original)
    def fully_shard(module: Any, *args: Any, **options: Any) -> Any:
        if policy.master_weights and options.get("mp_policy") in (None, _nothing_asked()):
            options["mp_policy"] = _of_level(policy)
            report(
                "fsdp-policy",
                f"`fully_shard` gathers weights in {policy.dtype}, and reduces gradients in FP32: "
                "it was given no MixedPrecisionPolicy",
            )
        if policy.ddp.comm_dtype and (policy.cast_model_type == "none" or policy.master_weights):
            report(
                "fsdp-reduction",
                "`fully_shard` reduces gradients as its MixedPrecisionPolicy says, in FP32 if in nothing else: "
                "`ddp.comm_dtype` is for DistributedDataParallel",
            )
        modules = module if isinstance(module, (list, tuple)) else [module]
        for one in modules:
            before(one)
        result = original(module, *args, **options)
        for one in modules:
            sharded(one)
        return result

    return fully_shard


def _nothing_asked() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy()


def _of_level(policy: Policy) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=HALF[policy.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
