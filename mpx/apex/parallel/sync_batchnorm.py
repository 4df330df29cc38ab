"""Synchronised batch normalisation by torch under apex's signatures."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` under apex's signature.

    Raises:
        ValueError: `fuse_relu` is asked for.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        if fuse_relu:
            raise ValueError("fuse_relu is not carried out by mpx. Expected a ReLU after the SyncBatchNorm")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Return the module with its BatchNorm layers replaced by torch's SyncBatchNorm."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this rank's group of `group_size` ranks; None, which is all of them, for 0."""
    if not group_size:
        return None
    own, _ = distributed.new_subgroups(group_size)
    return own
