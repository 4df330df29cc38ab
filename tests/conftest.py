"""Fixtures for every test: torch must be left as it was found, and sessions are made from preset names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).parent.parent

# the same examples each time, however slow the machine
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none; asked of torch only when there are such tests."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="not run on a GPU: none here"))


def _fingerprint() -> dict[str, Any]:
    """Return what a session changes of torch: names, optimizer steps, dispatcher kernels, hooks, modes, defaults."""
    import torch

    from mpx.engine.intercepts import TABLE
    from mpx.engine.stepping import OURS, wrapped_classes

    targets = {}
    for row in TABLE:
        owner: Any = sys.modules.get(row.module)
        if owner is None:
            continue
        *path, name = row.path.split(".")
        for part in path:
            owner = getattr(owner, part)
        targets[f"{row.module}:{row.path}"] = vars(owner).get(name) or getattr(owner, name)
    module = torch.nn.modules.module
    hooks = [
        value
        for name, value in vars(module).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    ]
    return {
        **targets,
        "kernels": {
            key: frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))
            for key in ("AutocastCPU", "AutocastCUDA")
        },
        "steps of ours": [
            k.__qualname__
            for k in wrapped_classes(torch.optim.Optimizer)
            if hasattr(k.__dict__["step"], OURS)
        ],
        "global hooks": [len(value) for value in hooks],
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ],
        "nesting": _autocast_depth(),
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "finders": [
            type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("mpx")
        ],
    }


def _autocast_depth() -> int:
    import torch

    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def torch_untouched() -> Iterator[None]:
    """Fail a test that leaves a hook, a rule or a patch behind. Tests that never import torch do not pay for it."""
    before = _fingerprint() if "torch" in sys.modules else None
    yield
    if before is not None:
        after = _fingerprint()
        assert {
            key: after[key] for key in before
        } == before  # a module imported meanwhile has no earlier state


@pytest.fixture
def fingerprint() -> Callable[[], dict[str, Any]]:
    """Return the function that describes torch's present state, for tests that compare it themselves."""
    return _fingerprint


@dataclass
class Recorded:
    """A session in this process, with the events that it wrote."""

    session: Any
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def summary(self) -> dict[str, Any]:
        """Return the cumulative snapshot."""
        summary: dict[str, Any] = self.session.summary()
        return summary

    def substituted(self, name: str) -> bool:
        """Whether a substitution with this id was told."""
        return any(row["id"] == name for row in self.summary["substitutions"])


@pytest.fixture
def at_level() -> Callable[..., Any]:
    """Return a context manager: `with at_level("O1", "loss_scale.init=1024") as recorded:` trains at that level."""

    @contextmanager
    def enter(preset: str, *settings: str) -> Iterator[Recorded]:
        from mpx.engine.session import Session
        from mpx.presets import Override, resolve

        overrides = [Override(*setting.split("=", 1), origin="test") for setting in settings]
        policy = resolve(preset, overrides=overrides, cwd=REPOSITORY / "tests").policy
        recorded = Recorded(None)
        recorded.session = Session(
            policy,
            emit=lambda event, **fields: recorded.events.append({"event": event, **fields}),
            tick=lambda *, urgent=False: None,
        )
        recorded.session.install()
        try:
            yield recorded
        finally:
            recorded.session.close()

    return enter
