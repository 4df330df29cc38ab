"""Trains in one of several ways and tells how it is ended: `limited.py HOW [NAN_AT]`."""

import atexit
import multiprocessing
import sys
import threading

import torch

STEPS = 40


def train(name, nan_at=-1):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    try:
        for number in range(STEPS):
            data = torch.randn(8, 4) * (float("nan") if number == nan_at else 1.0)
            optimizer.zero_grad()
            model(data).pow(2).mean().backward()
            try:
                optimizer.step()
            except Exception as error:  # noqa: BLE001 - a script that survives everything
                print("caught", error)
            done = number + 1
    finally:
        print(name, "cleaned up after", done)


def stubborn(nan_at):
    try:
        train("stubborn", nan_at)
    except BaseException as error:  # noqa: BLE001 - a script that survives even that
        print("survived", type(error).__name__)


if __name__ == "__main__":
    how, nan_at = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
    atexit.register(print, "said goodbye")
    if how == "plain":
        train("plain", nan_at)
    elif how == "stubborn":
        for _ in range(3):
            stubborn(nan_at)
    elif how == "thread":
        worker = threading.Thread(target=train, args=("thread", nan_at))
        worker.start()
        worker.join()
    elif how == "child":
        child = multiprocessing.get_context("fork").Process(target=train, args=("child", nan_at))
        child.start()
        child.join()
        print("child ended with", child.exitcode)
    elif how == "fail":
        train("fail")
        sys.exit(3)
    print("went on to the end")
