"""`--nproc` and its companions: the command that they are short for."""

import sys

import pytest

from mpx.errors import UsageError
from mpx.launch.target import Target
from mpx.launch.torchrun import as_ranks

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SCRIPT = Target("script", (sys.executable, "train.py", "--lr", "1"), "train")


def test_without_it_nothing_changes():
    assert as_ranks(SCRIPT, None) is SCRIPT


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (SCRIPT, ("train.py", "--lr", "1")),
        (Target("module", (sys.executable, "-m", "pkg.train"), "pkg.train"), ("-m", "pkg.train")),
        (Target("command", ("/bin/tool", "x"), "tool"), ("--no-python", "/bin/tool", "x")),
    ],
)
def test_on_one_node_torchrun_finds_a_port_by_itself(target, words):
    ranks = as_ranks(target, "4")
    assert ranks.argv == (*TORCHRUN, "--nproc-per-node", "4", "--standalone", *words)
    assert (ranks.kind, ranks.name) == (target.kind, target.name)


def test_on_several_nodes_the_order_is_that_of_the_node_ranks_or_any():
    numbered = as_ranks(SCRIPT, "gpu", nnodes="2", node_rank=1, rdzv_endpoint="a:29400").argv
    assert numbered[3:-3] == (
        *("--nproc-per-node", "gpu", "--nnodes", "2", "--rdzv-endpoint", "a:29400"),
        *("--node-rank", "1"),
    )
    elastic = as_ranks(SCRIPT, "gpu", nnodes="1:4", rdzv_endpoint="a:29400").argv
    assert elastic[-5:-3] == ("--rdzv-backend", "c10d")


@pytest.mark.parametrize(
    "options",
    [
        {"nproc": "0"},
        {"nproc": "-1"},
        {"nproc": "two"},
        {"nproc": "²"},
        {"nproc": None, "nnodes": "2"},
        {"nproc": None, "rdzv_endpoint": "a:1"},
        {"nproc": "2", "nnodes": "2"},
    ],
)
def test_what_does_not_fit_together_is_refused(options):
    with pytest.raises(UsageError):
        as_ranks(SCRIPT, options.pop("nproc"), **options)
