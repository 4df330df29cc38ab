"""What mpx has to know of a device type: one row a type, no if-chains elsewhere."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from mpx.errors import DeviceError
from mpx.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["DEVICES", "Device", "describe", "device_of", "peak_memory"]

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
AMPERE = (
    8,
    0,
)  # the first compute capability with BF16 units; torch counts older ones as "supported" by emulation


@frozen
class Device:
    """One device type.

    Attributes:
        type: torch's name ("cpu", "cuda").
        autocast_key: Dispatch key of its autocast rules.
        available: Whether this process can use it; must not initialise the device.
        capabilities: Names of the instruction sets or units that op rules may ask for.
        peak_bytes: Peak memory of this process on it so far, in bytes.
        name: The model, for the record.
        require: Raises DeviceError when it cannot compute in a half type; may initialise the device.
        fetch: Starts to copy a tensor of one dimension to the host, and returns what waits for the copy and gives the
            numbers; None where reading a number waits for nothing.
    """

    type: str
    autocast_key: str
    available: Callable[[], bool]
    capabilities: Callable[[], frozenset[str]]
    peak_bytes: Callable[[], int]
    name: Callable[[], str]
    require: Callable[[torch.dtype], None]
    fetch: Callable[[Tensor], Callable[[], list[float]]] | None = None


def _cpu_capabilities() -> frozenset[str]:
    return frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)


def _cpu_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB, macOS bytes


def _cuda_require(half: torch.dtype) -> None:
    if half is torch.bfloat16 and torch.cuda.get_device_capability() < AMPERE:
        major, minor = torch.cuda.get_device_capability()
        raise DeviceError(
            f"`{torch.cuda.get_device_name()}` cannot compute in `bfloat16`. Expected compute capability 8.0 or newer. "
            f"Received {major}.{minor}",
            hint="use `--dtype float16`",
        )


def _fetch_from_cuda(numbers: Tensor) -> Callable[[], list[float]]:
    copy = numbers.detach().to("cpu", non_blocking=True)  # into pinned memory: torch's way not to block
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def arrived() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return arrived


DEVICES: dict[str, Device] = {
    device.type: device
    for device in (
        Device(
            type="cpu",
            autocast_key="AutocastCPU",
            available=lambda: True,
            capabilities=_cpu_capabilities,
            peak_bytes=_cpu_peak_bytes,
            name=lambda: str(torch.cpu.get_capabilities().get("cpu_name", "cpu")),
            require=lambda half: None,
        ),
        Device(
            type="cuda",
            autocast_key="AutocastCUDA",
            available=torch.cuda.is_available,
            capabilities=frozenset,
            peak_bytes=torch.cuda.max_memory_allocated,
            name=torch.cuda.get_device_name,
            require=_cuda_require,
            fetch=_fetch_from_cuda,
        ),
    )
}


def device_of(tensor: torch.Tensor) -> Device:
    """Return the row of a tensor's device; types without a row (meta, mps, ...) raise DeviceError."""
    row = DEVICES.get(tensor.device.type)
    if row is None:
        raise DeviceError(
            f"mpx has no rules for device type `{tensor.device.type}`. Expected one of: {', '.join(DEVICES)}",
            hint="run the script with `--opt-level O0`, or move the model to one of these devices",
        )
    return row


def peak_memory() -> tuple[str, int]:
    """Return the type of the device that counts, the accelerator once it is in use, and its peak so far in bytes."""
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    return kind, DEVICES[kind].peak_bytes()


def describe() -> dict[str, object]:
    """Return type, name and capabilities of the device that a run most likely uses, without initialising one."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    row = DEVICES[kind]
    name = row.name() if kind == "cpu" or torch.cuda.is_initialized() else kind
    relevant = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16")
    return {"type": kind, "name": name, "capabilities": sorted(row.capabilities().intersection(relevant))}
