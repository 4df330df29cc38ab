"""What the command line changes in a level changes what the script computes."""

import pytest

TYPES = {
    "-O O1": "body=float16 softmax=float32 product=float16 head=float16",
    "-O O1 --dtype bfloat16": "body=bfloat16 softmax=float32 product=bfloat16 head=bfloat16",
    "-O O1 --fp32-module Head": "body=float16 softmax=float32 product=float16 head=float32",
    "-O O2 --fp32-module head": "body=float16 softmax=float16 product=float16 head=float32",
    "-O O1 --fp32-module Model": "body=float32 softmax=float32 product=float32 head=float32",
    "-O O2 --fp32-module Model": "body=float32 softmax=float32 product=float32 head=float32",
    "-O O1 --half-op softmax --fp32-op linear": "body=float32 softmax=float16 product=float16 head=float16",
    "-O O2 --fp32-op softmax": "body=float16 softmax=float32 product=float16 head=float16",
}


@pytest.fixture(scope="session")
def runs(processes, all_of):
    return all_of({options: processes.mpx(options, "tell_types.py") for options in TYPES})


@pytest.mark.parametrize("options", TYPES)
def test_operations_run_in_the_types_that_were_asked_for(runs, options):
    told = " ".join(line.replace(" torch.", "=") for line in runs[options].succeeded().lines)
    assert told == f"{TYPES[options]} loss=float32"
