"""`--nproc`: the target as several ranks, which is torchrun's work and not ours."""

from __future__ import annotations

import dataclasses
import sys

from mpx.errors import UsageError
from mpx.launch.target import Target

__all__ = ["as_ranks"]

WORDS = ("auto", "gpu", "cpu")  # torchrun counts these itself


def as_ranks(
    target: Target,
    nproc: str | None,
    *,
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
) -> Target:
    """Return the target started `nproc` times by `python -m torch.distributed.run`; as it is without `nproc`.

    On one node the ranks find each other through a free port. On several they meet at `rdzv_endpoint`: in the order of
    `node_rank` where that is given, in any order else.

    Raises:
        UsageError: The options do not fit together.
    """
    of_nodes = {"--nnodes": nnodes, "--node-rank": node_rank, "--rdzv-endpoint": rdzv_endpoint}
    given = [f"`{name}`" for name, value in of_nodes.items() if value is not None]
    if nproc is None:
        if given:
            raise UsageError(
                f"{', '.join(given)} without `--nproc`. Expected the number of ranks of each node"
            )
        return target
    if nproc not in WORDS and not (nproc.isascii() and nproc.isdigit() and int(nproc)):
        raise UsageError(
            f"`--nproc` is the number of ranks to start. Expected a number from 1, or {', '.join(WORDS)}. "
            f"Received `{nproc}`"
        )
    if nnodes not in (None, "1") and rdzv_endpoint is None:
        raise UsageError(
            f"`--nnodes {nnodes}` needs a place to meet. Expected `--rdzv-endpoint HOST:PORT`, the same on every node"
        )
    options = ["--nproc-per-node", nproc]
    if rdzv_endpoint is None:
        options += ["--standalone"]
    else:
        options += ["--nnodes", nnodes or "1", "--rdzv-endpoint", rdzv_endpoint]
        options += ["--rdzv-backend", "c10d"] if node_rank is None else ["--node-rank", str(node_rank)]
    what = ("--no-python", *target.argv) if target.kind == "command" else target.argv[1:]
    return dataclasses.replace(target, argv=(sys.executable, "-m", "torch.distributed.run", *options, *what))
