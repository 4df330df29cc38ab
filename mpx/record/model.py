"""The run record: what a run left behind, as one value. Names are fixed: tools parse them."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from mpx.errors import RecordError
from mpx.record import codec
from mpx.record.parts import (
    Communication,
    Coverage,
    Desync,
    Device,
    Fault,
    Finding,
    Gradients,
    LossCurve,
    Memory,
    OptimizerSteps,
    Overflow,
    OverflowCounts,
    Rank,
    Scaler,
    Steps,
    Stop,
    Substitution,
    Throughput,
    Verdict,
)
from mpx.values import frozen

__all__ = ["Process", "RunRecord", "Snapshot"]


@frozen
class Process:
    """One process that imported torch. `trained`: it ran a backward pass or an optimizer step."""

    process: str
    pid: int = 0
    ppid: int | None = None
    host: str = ""
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    restart: int | None = None
    torch: str | None = None
    python: str | None = None
    argv: list[str] = field(default_factory=list)
    threads: int | None = None
    device: Device | None = None
    started_t: float | None = None
    last_t: float | None = None
    ended: bool = False
    exit_code: int | None = None
    signal: str | None = None
    trained: bool = False
    forwards: int = 0
    backwards: int = 0
    steps: Steps = field(default_factory=Steps)


@frozen
class Snapshot:
    """Everything that one process counted from its start until now: the payload of a `snapshot` event."""

    forwards: int = 0
    backwards: int = 0
    steps: Steps = field(default_factory=Steps)
    optimizers: list[OptimizerSteps] = field(default_factory=list)
    scalers: list[Scaler] = field(default_factory=list)
    nonfinite_losses: int = 0
    overflow_counts: OverflowCounts = field(default_factory=OverflowCounts)
    losses: list[LossCurve] = field(default_factory=list)
    throughput: Throughput | None = None
    memory: Memory | None = None
    gradients: Gradients | None = None
    communication: Communication | None = None
    coverage: Coverage | None = None
    casts: dict[str, Any] = field(default_factory=dict)
    substitutions: list[Substitution] = field(default_factory=list)
    longest_skip_run: int = 0
    saw_script_amp: bool = False
    shared_passes: int = 0

    @property
    def trained(self) -> bool:
        """Whether the process ran a backward pass or an optimizer step."""
        return self.backwards > 0 or self.steps.attempted > 0

    @property
    def active(self) -> bool:
        """Whether the process did anything that a level can change."""
        return self.trained or self.forwards > 0


@frozen
class RunRecord:
    """The fold of all events of a run: `run.json`.

    `status` is completed, failed, interrupted or killed; `unknown` when no ending was written (the run goes
    on, or its supervisor was killed, or it ran under a launcher of ranks and had none).
    """

    SCHEMA: ClassVar[int] = 1

    schema: int = SCHEMA
    mpx: str | None = None
    torch: str | None = None
    python: str | None = None
    device: Device | None = None
    host: str | None = None
    command: list[str] = field(default_factory=list)
    script: str | None = None
    target_kind: str | None = None
    cwd: str | None = None
    preset: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    signal: str | None = None
    status: str = "unknown"
    started: str | None = None
    wall_s: float | None = None
    ended_t: float | None = None
    processes: list[Process] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    overflowing: dict[str, list[int]] = field(default_factory=dict)
    desyncs: list[Desync] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    steps: Steps = field(default_factory=Steps)
    optimizers: list[OptimizerSteps] = field(default_factory=list)
    scalers: list[Scaler] = field(default_factory=list)
    nonfinite_losses: int = 0
    overflow_counts: OverflowCounts = field(default_factory=OverflowCounts)
    overflows: list[Overflow] = field(default_factory=list)
    losses: list[LossCurve] = field(default_factory=list)
    throughput: Throughput | None = None
    memory: Memory | None = None
    gradients: Gradients | None = None
    communication: Communication | None = None
    coverage: Coverage | None = None
    casts: dict[str, Any] = field(default_factory=dict)
    substitutions: list[Substitution] = field(default_factory=list)
    longest_skip_run: int = 0
    saw_script_amp: bool = False
    stopped: Stop | None = None
    gates: list[Verdict] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as strict JSON holds it, non-finite numbers as `nan`, `inf`, `-inf`."""
        data: dict[str, Any] = codec.plain(self)
        return data

    def to_json(self) -> str:
        """Return the text of `run.json`, with a final newline."""
        return codec.dumps(self, indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunRecord:
        """Return the record that `data` describes.

        Raises:
            RecordError: `data` is no record, or one of a later schema.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if not isinstance(schema, int):
            raise RecordError(f"not a run record: no `schema`. Expected {cls.SCHEMA}")
        if schema > cls.SCHEMA:
            raise RecordError(
                f"the run record has schema {schema}. Expected at most {cls.SCHEMA}",
                hint="it was written by a later mpx: update mpx to read it",
            )
        return codec.from_json(cls, data)
