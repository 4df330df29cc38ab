"""How much of the matmul and convolution work of a forward pass was done in half: counted on one sampled call."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from mpx.monitors.base import Monitor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Coverage"]

SAMPLED_CALL = 3  # the first ones compile and initialise
HALF = (torch.float16, torch.bfloat16)
NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def _attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,  # noqa: SLF001 - an op
}


class Coverage(Monitor):
    """`coverage` and `casts` of the record. Backward passes do twice the work in the same types."""

    def __init__(self, half_outside: Callable[[], torch.dtype | None]) -> None:
        """Make the monitor.

        Args:
            half_outside: Returns the type of the op that is being computed in FP32 between half tensors, because its
                half kernel is slow here: it counts as the half op that it stands for.
        """
        self._half_outside = half_outside
        self._calls = 0
        self._counter: _Counter | None = None
        self._compiled = False
        self._graphs_before = _graphs_compiled()

    def around(self, root: nn.Module) -> AbstractContextManager[Any]:
        if self._counter is not None or not torch.is_grad_enabled():
            return nullcontext()
        self._calls += 1
        if self._calls < SAMPLED_CALL:
            return nullcontext()
        if _graphs_compiled() > self._graphs_before:  # under a dispatch mode they would silently run eagerly
            self._compiled = True
            return nullcontext()
        self._counter = _Counter(self._half_outside)
        return self._counter

    def snapshot(self) -> dict[str, Any]:
        counter = self._counter
        if counter is None:
            return {"coverage": {"missing": "torch.compile"} if self._compiled else None}
        if counter.fault is not None:
            raise counter.fault
        total = sum(row[0] for row in counter.work.values())
        half = sum(row[0] for (_, dtype), row in counter.work.items() if dtype in HALF)
        rows = [
            {"op": op, "dtype": NAMES.get(dtype, str(dtype)), "flops": flops, "calls": calls}
            for (op, dtype), (flops, calls) in sorted(counter.work.items(), key=lambda item: -item[1][0])
        ]
        return {
            "coverage": {"half_flops_share": half / total if total else None, "by_op": rows},
            "casts": {"sampled_ops": dict(counter.ops)},
        }


class _Counter(TorchDispatchMode):
    """Counts floating operations and results by type; changes nothing that is computed, and never raises there."""

    def __init__(self, half_outside: Callable[[], torch.dtype | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half_outside = half_outside
        self.work: dict[tuple[str, torch.dtype], tuple[int, int]] = {}
        self.ops: dict[str, int] = defaultdict(int)
        self.fault: Exception | None = None  # raised where a monitor may: not amid the script's forward pass

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load the compiler to keep it out of this method; as one of mpx it is left uncompiled anyway
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        try:
            self._count(func, args, kwargs, out)
        except Exception as error:  # noqa: BLE001 - a formula met arguments that it does not know
            self.fault = error
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor) or first.dtype not in NAMES:
            return
        self.ops[NAMES[first.dtype]] += 1
        packet: Any = getattr(func, "overloadpacket", None)
        formula = FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            key = (packet.__name__, self._half_outside() or first.dtype)
            flops, calls = self.work.get(key, (0, 0))
            self.work[key] = (flops + int(formula(*args, **kwargs, out_val=out)), calls + 1)


def _graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"].get("unique_graphs", 0)) if utils is not None else 0
