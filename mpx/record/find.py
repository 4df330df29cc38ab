"""`find_run`: the run that a user means by a path, by a part of its name, or by nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpx.errors import RecordError
from mpx.record.directory import RunDirectory, is_run

__all__ = ["all_runs", "all_runs_here", "find_run"]


def find_run(run: str | Path | None, cwd: Path) -> RunDirectory:
    """Return the run directory that `run` names.

    Args:
        run: A run directory, its `run.json`, a folder that holds `.mpx/runs`, a name below `.mpx/runs` or the
            beginning or end of one, or None or `latest` for the latest.
        cwd: Where to look from; `.mpx/runs` is looked for upward, not beyond a repository's root.

    Raises:
        RecordError: There is no such run, or several.
    """
    path = cwd / (run or "latest")
    if run is None or (str(run) == "latest" and not path.exists()):
        runs = next((found for found in _runs_upward(cwd) if _latest(found)), None)
        latest = _latest(runs) if runs else None
        if latest is None:
            raise RecordError(
                f"no run found: there is no `.mpx/runs` in `{cwd}` or above it",
                hint="start one with `mpx run --opt-level O1 train.py`, or give the run's directory",
            )
        return RunDirectory(latest)
    if path.exists():
        for runs in (path, path / "runs", path / ".mpx" / "runs"):
            if not is_run(path) and (latest := _latest(runs)):
                return RunDirectory(latest)
        return RunDirectory.open(path.resolve() if path.is_symlink() else path)
    return RunDirectory(_by_name(str(run), cwd))


def _by_name(name: str, cwd: Path) -> Path:
    known = {path.name: path for path in all_runs_here(cwd)}
    matches = sorted(known[item] for item in known if item.startswith(name) or item.endswith(name))
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RecordError(
            f"`{name}` names {len(matches)} runs. Expected one",
            hint="one of: " + ", ".join(f"`{path.name}`" for path in matches[-5:]),
        )
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise RecordError(
        f"no run `{name}`. Expected a run directory, or a name below `.mpx/runs`",
        hint=f"did you mean `{near[0]}`?" if near else "without a name, `mpx report` takes the latest run",
    )


def _runs_upward(cwd: Path) -> Iterator[Path]:
    for folder in (here := cwd.absolute(), *here.parents):
        runs = folder / ".mpx" / "runs"
        if runs.is_dir():
            yield runs
        if (folder / ".git").exists():
            return


def all_runs_here(cwd: Path) -> list[Path]:
    """Return the directories of all runs below `.mpx/runs` in `cwd` or above it."""
    return [path for runs in _runs_upward(cwd) for path in all_runs(runs)]


def all_runs(runs: Path) -> list[Path]:
    """Return the run directories in one folder, by name."""
    if not runs.is_dir():
        return []
    return sorted(path for path in runs.iterdir() if not path.is_symlink() and is_run(path))


def _latest(runs: Path) -> Path | None:
    link = runs / "latest"
    if is_run(link):
        return link.resolve()
    return max(all_runs(runs), key=lambda path: (path.stat().st_mtime, path.name), default=None)
