from pathlib import Path

import pytest

from mpx.errors import PresetError
from mpx.presets import Override, Resolved, resolve


@pytest.fixture
def here(tmp_path):
    """A current folder that is the root of a repository, so that no project file above it can matter."""
    (tmp_path / ".git").mkdir()
    return tmp_path


@pytest.fixture
def write(here):
    """Write a preset below the current folder and return how `--opt-level` would name it."""

    def write(name: str, text: str) -> str:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return f"./{name}"

    return write


@pytest.fixture
def problems(here):
    """Resolve what must be refused, and return the problems."""

    def problems(preset: str | None, *overrides: Override, cwd: Path | None = None):
        with pytest.raises(PresetError) as caught:
            resolve(preset, overrides=overrides, cwd=cwd or here)
        assert caught.value.problems, "a refused preset says why"
        return caught.value.problems

    return problems


@pytest.fixture
def resolved(here):
    def resolved(preset: str | None, *overrides: Override) -> Resolved:
        return resolve(preset, overrides=overrides, cwd=here)

    return resolved
