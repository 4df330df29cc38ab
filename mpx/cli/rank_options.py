"""The options that start the target as several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mpx.errors import UsageError

if TYPE_CHECKING:
    from mpx.launch.target import Target

__all__ = ["rank_options", "take_ranks"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--nproc",
        metavar="N",
        help="Start TARGET as N ranks of torch.distributed, as torchrun does; `gpu`: one on each GPU.",
    ),
    click.option(
        "--nnodes", metavar="N", help="How many nodes take part, each with its own `mpx run --nproc`."
    ),
    click.option(
        "--node-rank", type=click.IntRange(min=0), metavar="I", help="Which of the nodes this is, from 0."
    ),
    click.option(
        "--rdzv-endpoint", metavar="HOST:PORT", help="Where the nodes meet: a free port of one of them."
    ),
)


def rank_options(command: _Command) -> _Command:
    """Add `--nproc` and what several nodes need."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_ranks(target: Target, options: dict[str, Any]) -> Target:
    """Return the target as many times as the options say, and take them out of `options`."""
    of_nodes = {name: options.pop(name) for name in ("nnodes", "node_rank", "rdzv_endpoint")}
    nproc = options.pop("nproc")
    if nproc is None and not any(value is not None for value in of_nodes.values()):
        return target
    from mpx.launch.placement import rank_key
    from mpx.launch.torchrun import as_ranks

    if nproc is not None and rank_key(os.environ) is not None:
        raise UsageError(
            "`--nproc` starts ranks, and this process is a rank already",
            hint="leave out `--nproc`, or the launcher around it",
        )
    return as_ranks(target, nproc, **of_nodes)
