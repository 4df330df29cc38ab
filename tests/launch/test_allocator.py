"""Memory that a step frees is there for the next one: what the kernel hands out anew is counted as page faults."""

import platform

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another allocator has other habits"
)

STEPS = """
import resource
import torch

weight = torch.ones(2, requires_grad=True)

def step():
    weight.sum().backward()
    blocks = [torch.empty(2_500_000, dtype=torch.uint8) for _ in range(60)]
    for block in blocks:
        block.fill_(1)
    del block
    while blocks:
        blocks.pop()

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HEAP = """
import ctypes
import torch

class Info(ctypes.Structure):  # of glibc's malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
torch.ones(2, requires_grad=True).sum().backward()
"""
# A block that glibc maps from the kernel, and gives back when it is freed, unless it is told to keep such blocks.
MAPPED = f"""{HEAP}
before = libc.mallinfo2().hblks
block = libc.malloc(ctypes.c_size_t(31 * 2**20))
print(libc.mallinfo2().hblks - before)
libc.free(block)
"""
# More free blocks of a small size than glibc keeps for each thread: the others are in its fast bins, if it has any.
SMALL = f"""{HEAP}
blocks = [libc.malloc(ctypes.c_size_t(100)) for _ in range(50)]
for block in blocks:
    libc.free(block)
print(libc.mallinfo2().smblks)
"""
PAGES = 10 * 60 * 2_500_000 // 4096  # that are written between the two counts
SELDOM = ("--set", "flush_interval_s=1000")


def faults(outcome):
    return int(outcome.stdout)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_step_under_mpx_uses_the_memory_of_the_one_before(shell, level):
    """At a snapshot it is returned. These come at twice the time of the one before: three of the ten steps at most."""
    script = shell.script("steps.py", STEPS)
    assert faults(shell.mpx("-qq", "-O", level, *SELDOM, script)) < PAGES // 3


def maps(outcome):
    return bool(int(outcome.stdout))


def test_from_the_first_pass_on_small_blocks_lie_in_no_bin_that_large_ones_dissolve(shell):
    script = shell.script("blocks.py", SMALL)
    assert int(shell.python(script).stdout) > 0
    assert int(shell.mpx("-qq", "-O", "O1", script).stdout) == 0


def test_from_the_first_pass_on_large_blocks_are_kept(shell):
    script = shell.script("block.py", MAPPED)
    assert maps(shell.python(script))
    assert not maps(shell.mpx("-qq", "-O", "O1", script))


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"]
)
def test_an_environment_that_says_when_to_return_memory_is_obeyed(shell, name):
    script = shell.script("block.py", MAPPED)
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert maps(shell.mpx("-qq", "-O", "O1", script, env={name: value}))


def test_a_preset_can_leave_the_allocator_alone(shell):
    script = shell.script("block.py", MAPPED)
    assert maps(shell.mpx("-qq", "-O", "O1", "--set", "keep_freed_memory=false", script))


RESIDENT = """
import os
import torch

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def load():
    blocks = [torch.ones(2**20) for _ in range(100)]  # 400 MiB
    return torch.ones(100)  # above them on the heap

weight = torch.ones(2, requires_grad=True)
"""


def test_what_is_loaded_before_training_is_returned_as_by_python(shell):
    script = shell.script(
        "loads.py", RESIDENT + "before = resident()\nkept = load()\nprint(resident() - before)\n"
    )
    for outcome in (shell.python(script), shell.mpx("-qq", "-O", "O1", script)):
        assert float(outcome.stdout) < 100


def test_what_is_freed_while_it_trains_is_returned_with_a_snapshot(shell):
    script = shell.script(
        "loads.py",
        RESIDENT
        + """
weight.sum().backward()
before = resident()
kept = load()
held = resident() - before
for passes in range(100_000):
    weight.sum().backward()
    if resident() - before < 100:
        break
print(held, passes)
""",
    )
    held, passes = shell.mpx("-qq", "-O", "O1", "--set", "flush_interval_s=0.05", script).stdout.split()
    assert float(held) > 300
    assert int(passes) < 99_999
