"""Where an `mpx run` finds itself: alone, below another `mpx run`, or started by a launcher as one of several ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpx.errors import RecordError, UsageError
from mpx.record import RunDirectory

__all__ = ["is_disabled", "is_first_rank", "outer_run", "rank_key", "require_same"]


_LIMITS = ("gates", "abort_on", "max_steps")


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Tell whether `MPX_DISABLE` turns everything off."""
    return environ.get("MPX_DISABLE", "") not in ("", "0")


def outer_run(environ: Mapping[str, str]) -> RunDirectory | None:
    """Return the run that this process is part of already, or None."""
    path = environ.get("MPX_RUN")
    if not path:
        return None
    try:
        run = RunDirectory.open(Path(path))
        run.read_preset()
    except RecordError:
        return None  # the environment of a shell or a server that outlived its run
    return run


def require_same(preset: Mapping[str, Any], outer: RunDirectory) -> None:
    """Refuse a preset that differs from that of the run around us: one run has one precision.

    Raises:
        UsageError: They differ.
    """
    theirs, _ = outer.read_preset()
    differing = [
        key
        for key, value in preset.items()
        if key not in ("name", "description")
        and value != theirs.get(key)
        and not (key in _LIMITS and not value)  # what ends or judges the run is the outer one's to say
    ]
    if differing:
        raise UsageError(
            f"this `mpx run` is part of a run at `{theirs.get('name')}`, which differs in "
            f"{', '.join(f'`{key}`' for key in differing)}. Expected the same. Received `{preset.get('name')}`",
            hint="leave the level out here: the outer one holds for everything below it",
        )


def rank_key(environ: Mapping[str, str]) -> str | None:
    """Return a word that the ranks of this job share and other jobs do not; None when no launcher started us.

    A rank is not supervised: its launcher does that, and signals whole process groups.
    """
    if "RANK" in environ:
        job = environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun says `none` when it was given no id; then its own process tells its jobs apart.
        return f"{os.getppid()}-{environ.get('MASTER_PORT', '')}" if job == "none" else job
    if "SLURM_PROCID" in environ and not _is_batch_shell(environ):
        return f"{environ.get('SLURM_JOB_ID', 'slurm')}-{environ.get('SLURM_STEP_ID', '')}"
    return None


def is_first_rank(environ: Mapping[str, str]) -> bool:
    """Tell whether this is the rank that speaks for all."""
    return environ.get("RANK", environ.get("SLURM_PROCID")) == "0"


def _is_batch_shell(environ: Mapping[str, str]) -> bool:
    # sbatch gives its shell SLURM_PROCID as well, but only what srun starts is a step of the job.
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
