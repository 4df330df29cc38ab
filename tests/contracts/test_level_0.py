"""O0 is `python train.py`, bit for bit: what is printed, what is learnt and what is saved; the report comes on top."""

import re

import pytest

SMALL = {
    "train_gpt.py": "--steps 4 --log-every 1 --layers 2 --channels 32 --context 32 --batch 4 --eval-every 2 "
    "--eval-batches 1 --sample 20",
    "train_digits.py": "--steps 4 --log-every 1 --width 8",
}
FIXED = "--device cpu --out weights.pt"


@pytest.fixture(scope="session")
def runs(processes, all_of):
    folder = processes.scripts.parent.parent / "scripts"
    started = {}
    for script, few in SMALL.items():
        words = f"{few} {FIXED}".split()
        started[script, "plain"] = processes.plain(folder / script, *words)
        started[script, "O0"] = processes.mpx("-O O0", folder / script, *words)
        started[script, "O0 -v"] = processes.mpx("-O O0 -v", folder / script, *words)
    return all_of(started)


@pytest.fixture(params=SMALL)
def script(request):
    return request.param


@pytest.mark.parametrize("how", ["O0", "O0 -v"])
def test_what_a_script_prints_is_the_same_to_the_byte(runs, script, how):
    plain, ours = runs[script, "plain"].succeeded(), runs[script, how].succeeded()
    assert ours.stdout == plain.stdout
    assert len(re.findall(rb"loss \d", plain.stdout)) >= 4  # the losses are among it, with every digit


def test_stderr_is_the_report_and_nothing_else(runs, script):
    assert runs[script, "plain"].stderr == ""
    assert runs[script, "O0"].report == runs[script, "O0"].stderr.splitlines()


@pytest.mark.parametrize("how", ["O0", "O0 -v"])
def test_weights_and_optimizer_are_the_same_to_the_bit(runs, script, how, identical):
    import torch

    plain, ours = (torch.load(runs[script, kind].folder / "weights.pt") for kind in ("plain", how))
    assert identical(ours, plain)
    fresh = [tensor for tensor in ours["model"].values() if tensor.is_floating_point()]
    assert fresh
    assert all(tensor.dtype == torch.float32 for tensor in fresh)


def test_the_record_holds_the_losses_that_were_printed(runs, script):
    ours = runs[script, "O0"]
    printed = [float(value) for value in re.findall(r"step +\d+  loss (\S+)", ours.stdout.decode())]
    (curve,) = ours.record["losses"]
    assert curve["value"] == printed
    assert curve["backward"] == [1, 2, 3, 4]


def test_nothing_is_scaled_skipped_or_replaced(runs, script):
    record = runs[script, "O0"].record
    assert record["steps"] == {"attempted": 4, "applied": 4, "skipped": 0}
    assert (record["scalers"], record["overflows"], record["substitutions"]) == ([], [], [])
    assert record["preset"]["name"] == "O0"
    assert record["preset"]["loss_scale"]["mode"] == "none"


def test_a_file_that_compares_unequal_would_be_seen(identical):
    """The comparison that this contract rests on can tell one bit, one type and one key."""
    import torch

    one = {"w": torch.ones(3), "n": [1, 2]}
    assert identical(one, {"w": torch.ones(3), "n": [1, 2]})
    assert not identical(torch.zeros(2), -torch.zeros(2))
    for other in (
        {"w": torch.ones(3).nextafter(torch.tensor(2.0)), "n": [1, 2]},
        {"w": torch.ones(3).double(), "n": [1, 2]},
        {"w": torch.ones(3).int(), "n": [1, 2]},
        {"w": torch.ones(3), "n": [1, 3]},
        {"w": torch.ones(3)},
    ):
        assert not identical(one, other)
