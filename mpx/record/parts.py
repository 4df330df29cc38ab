"""The parts of a run record, one small value each. Names are fixed: tools parse them.

Passes and steps are counted from 1: the first `backward()` of a process is backward 1. A field that speaks
of a pass (of an overflow, a scaler, a loss) means that number.
"""

from __future__ import annotations

from dataclasses import field

from mpx.values import frozen

__all__ = [
    "Communication",
    "Coverage",
    "Desync",
    "Device",
    "Exponents",
    "Fault",
    "Finding",
    "Gradients",
    "LossCurve",
    "Memory",
    "OpWork",
    "OptimizerSteps",
    "Overflow",
    "OverflowCounts",
    "Rank",
    "Scaler",
    "StepTime",
    "Steps",
    "Stop",
    "Substitution",
    "Throughput",
    "Underflow",
    "Verdict",
]


@frozen
class Device:
    """Where the tensors of the run were; `capabilities` are the device table's words."""

    type: str = ""
    name: str = ""
    capabilities: list[str] = field(default_factory=list)


@frozen
class Steps:
    """Calls of `Optimizer.step`: each attempted one was either applied or skipped."""

    attempted: int = 0
    applied: int = 0
    skipped: int = 0


@frozen
class OptimizerSteps:
    """The steps of one optimizer; `name` is its class, with a number when there are several."""

    name: str
    attempted: int = 0
    applied: int = 0
    skipped: int = 0


@frozen
class Scaler:
    """The loss scale of one call site of `backward`; `history` holds `[backward, scale]`, thinned."""

    site: str
    final: float
    min: float
    max: float
    init: float
    growths: int = 0
    backoffs: int = 0
    overflows: int = 0
    history: list[list[float]] = field(default_factory=list)


@frozen
class OverflowCounts:
    """Backward passes with a non-finite value, each counted once, by where it came from.

    `forward_inf`: the loss was not finite, and a module's output is known to be where it began; `loss_nan`: the loss
    was not finite, and nothing is known of where that began. Neither says anything about the loss scale.
    """

    loss_nan: int = 0
    forward_inf: int = 0
    backward_inf: int = 0


@frozen
class Overflow:
    """One backward pass with a non-finite value; `kind` is a field name of `OverflowCounts`.

    `step` is the number of optimizer steps that were attempted before it, `scale` the loss scale that was in force.
    """

    kind: str
    backward: int = 0
    step: int | None = None
    scale: float | None = None
    module: str | None = None
    parameter: str | None = None
    site: str | None = None
    value: float | None = None
    process: str = ""
    rank: int | None = None
    t: float = 0.0


@frozen
class LossCurve:
    """The values of the loss of one call site of `backward`, thinned; first and last are always there."""

    site: str
    backward: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)


@frozen
class StepTime:
    """Milliseconds from one optimizer step to the next."""

    median: float
    p95: float


@frozen
class Throughput:
    """How fast the steps were, without the first ones; `history` holds `[step, milliseconds]`, thinned."""

    steps_per_s: float
    step_ms: StepTime | None = None
    history: list[list[float]] = field(default_factory=list)


@frozen
class Memory:
    """The most memory that was in use at once on `device`; `history` holds `[step, peak until then]`, thinned."""

    peak_bytes: int
    device: str = ""
    history: list[list[float]] = field(default_factory=list)


@frozen
class Exponents:
    """How many numbers were in [2^e, 2^(e+1)), for each e from `min` to `max`."""

    min: int
    max: int
    counts: list[int] = field(default_factory=list)


@frozen
class Underflow:
    """Which share of the gradients that are not 0 would be 0 in the half type, as they are and times the loss scale."""

    unscaled: float
    scaled: float


@frozen
class Gradients:
    """How large gradients were, from `passes` sampled ones: true values, before the script clips them.

    `zeros` is the share that is exactly 0, `scale` the loss scale of the last sample, `half` the type of `underflow`.
    """

    passes: int
    half: str = ""
    exponents: Exponents | None = None
    zeros: float = 0.0
    underflow: Underflow | None = None
    scale: float = 1.0


@frozen
class Rank:
    """One rank in one attempt (torchrun's restarts). `shared_passes`: those judged together with other ranks.

    `exit_code` and `signal` are what its launcher said when it failed; the ranks that were ended for it have neither.
    """

    rank: int = 0
    attempt: int = 0
    process: str = ""
    host: str = ""
    pid: int = 0
    backwards: int = 0
    steps: Steps = field(default_factory=Steps)
    shared_passes: int = 0
    step_ms: StepTime | None = None
    peak_bytes: int | None = None
    scales: dict[str, float] = field(default_factory=dict)
    overflows: int = 0
    ended: bool = False
    last_t: float | None = None
    exit_code: int | None = None
    signal: str | None = None


@frozen
class Communication:
    """The gradients that a rank gave to be reduced in `dtype`: `bytes`, and `full_bytes` in their own type.

    Counted in `buckets`, as they were handed over; what a network makes of them depends on its algorithm.
    """

    dtype: str
    buckets: int = 0
    bytes: int = 0
    full_bytes: int = 0


@frozen
class Desync:
    """Ranks that share gradients had other loss scales, first after pass `backward`: `scales` by rank."""

    site: str
    backward: int = 0
    attempt: int = 0
    scales: dict[str, float] = field(default_factory=dict)


@frozen
class OpWork:
    """What one operation did in one dtype."""

    op: str
    dtype: str
    flops: float = 0.0
    calls: int = 0


@frozen
class Coverage:
    """How much of the matmul and convolution work ran in a half type (0 to 1; None when not measured).

    `missing` is why it could not be measured, where it could not.
    """

    half_flops_share: float | None = None
    by_op: list[OpWork] = field(default_factory=list)
    missing: str = ""


@frozen
class Substitution:
    """Something that mpx did otherwise than the script asked; `text` is a sentence for the report."""

    id: str
    text: str
    count: int = 1


@frozen
class Stop:
    """mpx ended the script. `reason` is max-steps or abort-on, `text` what was asked and what was met."""

    reason: str
    text: str = ""
    step: int = 0
    backward: int = 0
    process: str = ""
    t: float = 0.0


@frozen
class Verdict:
    """What became of a gate. `value` is in the gate's own unit; None when it could not be judged, which is no pass."""

    gate: str
    passed: bool
    value: float | None = None
    text: str = ""
    origin: str = ""


@frozen
class Fault:
    """A part of mpx that failed while the run went on."""

    where: str
    text: str
    process: str = ""
    count: int = 1


@frozen
class Finding:
    """A conclusion: `severity` is info, warning or error; `hint` is a command or an edit."""

    id: str
    severity: str
    text: str
    evidence: str = ""
    hint: str | None = None
