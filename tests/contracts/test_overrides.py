"""What the command line changes in a level changes what the script computes."""

from functools import partial

import pytest

# In the order: product of the body, weights of BatchNorm, softmax, another product, product of the head.
TYPES = {
    "-O O1 --fp32-module Head": "16 32 32 16 32",
    "-O O1 --fp32-module Model": "32 32 32 32 32",
    "-O O1 --half-op softmax --fp32-op linear": "32 32 16 16 16",
    "-O O2 --no-keep-batchnorm-fp32": "16 16 16 16 16",
    "-O O2 --fp32-module head --fp32-op softmax": "16 32 32 16 32",
    "-O O3 --keep-batchnorm-fp32 --fp32-module Head": "16 32 16 16 32",
}
SLOW = {
    "-O O0": "32 32 32 32 32",
    "-O O1": "16 32 32 16 16",
    "-O O1 --dtype bfloat16": "b16 32 32 b16 b16",
    "-O O2": "16 32 16 16 16",
    "-O O2 --fp32-module Model": "32 32 32 32 32",
    "-O O3": "16 16 16 16 16",
    "-O O3 --fp32-module Model": "32 32 32 32 32",
}


@pytest.fixture(scope="session")
def runs(processes, as_asked):
    asked = {options: processes.mpx(options, "tell_types.py") for options in TYPES}
    asked |= {options: partial(processes.mpx, options, "tell_types.py") for options in SLOW}
    return as_asked(asked)


@pytest.mark.parametrize(
    "options", [*TYPES, *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW)]
)
def test_operations_run_in_the_types_that_were_asked_for(runs, options):
    lines = runs[options].succeeded().lines
    *told, loss = (line.split()[-1].removeprefix("torch.").replace("float", "") for line in lines)
    assert " ".join(told) == {**TYPES, **SLOW}[options]
    assert loss == "32"
    assert len(told) == 5
