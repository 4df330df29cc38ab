"""The run directory: where a run's preset, events and record live, and how one is found again."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpx.errors import RecordError
from mpx.record.codec import dumps
from mpx.record.retention import Event
from mpx.record.shards import ShardWriter, read_shard, write_atomically

if TYPE_CHECKING:
    from mpx.record.model import RunRecord

__all__ = ["RunDirectory"]


class RunDirectory:
    """One run on disk: `preset.json`, `ops.json`, `events/*.jsonl`, `run.json`. `path` is absolute.

    `notice` is a sentence for the user when the directory is not where one would look for it.
    """

    def __init__(self, path: Path, *, notice: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.notice = notice

    @classmethod
    def create(cls, out: Path | None, *, cwd: Path, target_name: str, level: str) -> RunDirectory:
        """Return a new, empty run directory.

        Args:
            out: The directory that the user named, or None for a new one below `.mpx/runs`.
            cwd: Where the run starts; when nothing can be written there the temporary folder serves.
            target_name: The script's or module's name, for the directory's.
            level: The preset's name, for the directory's.

        Raises:
            RecordError: `out` is not empty or cannot be written, or there is no place to write at all.
        """
        if out is not None:
            return cls._create_named(cwd / out)
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{_run_name(target_name, level)}"
        runs = cwd.absolute() / ".mpx" / "runs"
        try:
            _make_runs(runs)
            path = _make_unique(runs, name)
        except OSError as error:
            return cls._create_temporary(name, error)
        _link_latest(runs, path)
        return cls(path)

    @classmethod
    def join(cls, key: str, *, cwd: Path, target_name: str, level: str) -> RunDirectory:
        """Return the run directory that all processes with `key` share, made by whichever comes first.

        For ranks that a launcher starts on their own, with no supervisor above them that could make it.
        """
        runs = cwd.absolute() / ".mpx" / "runs"
        path = runs / f"{_run_name(target_name, level)}-{_slug(key)}"
        try:
            _make_runs(runs)
            (path / "events").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        _link_latest(runs, path)
        return cls(path)

    @classmethod
    def _create_named(cls, path: Path) -> RunDirectory:
        path = Path(path).absolute()
        try:
            if path.is_dir() and any(path.iterdir()):
                raise RecordError(
                    f"the run directory `{path}` is not empty. Expected a new or an empty one",
                    hint="name another with `--out`, or leave `--out` out: every run then gets its own",
                )
            (path / "events").mkdir(parents=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path)

    @classmethod
    def _create_temporary(cls, name: str, reason: OSError) -> RunDirectory:
        import tempfile

        try:
            path = Path(tempfile.mkdtemp(prefix=f"mpx-{name}-"))
            (path / "events").mkdir()
        except OSError as error:
            raise _unwritable(Path(tempfile.gettempdir()), error) from None
        why = reason.strerror or str(reason)
        return cls(path, notice=f"the current folder cannot be written ({why}): the record is in `{path}`")

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the run directory at `path`.

        Raises:
            RecordError: There is none.
        """
        path = Path(path)
        if path.name == "run.json" and path.is_file():
            path = path.parent
        if not is_run(path):
            raise RecordError(
                f"no run at `{path}`. Expected a folder with `preset.json`, `events/` or `run.json`"
            )
        return cls(path)

    def write_preset(self, policy: Mapping[str, Any], origin: Mapping[str, str]) -> None:
        """Write what the run was asked to do: every process of the run reads it from here.

        Raises:
            RecordError: The disk refuses.
        """
        self._write("preset.json", dumps({"preset": policy, "origin": origin}, indent=2) + "\n")

    def write_op_groups(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what the groups of operations in the preset hold, so that no process of the run has to read YAML.

        Raises:
            RecordError: The disk refuses.
        """
        self._write("ops.json", json.dumps(groups) + "\n")

    def read_preset(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the policy as a dict and the origin of each of its fields.

        Raises:
            RecordError: The file is missing or damaged.
        """
        data = _read_json(self.path / "preset.json")
        if not isinstance(data, dict) or not isinstance(data.get("preset"), dict):
            raise RecordError(f"`{self.path / 'preset.json'}` is damaged. Expected an object with `preset`")
        origin = data.get("origin")
        return data["preset"], origin if isinstance(origin, dict) else {}

    def read_op_groups(self) -> dict[str, dict[str, Any]]:
        """Return the groups of operations that the command has read; none where it left that to others."""
        with suppress(RecordError):
            groups = _read_json(self.path / "ops.json")
            if isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values()):
                return {name: group for name, group in groups.items() if isinstance(group.get("ops"), dict)}
        return {}

    def shard(self, name: str) -> ShardWriter:
        """Return the writer of one process; `name` must be the process's alone."""
        return ShardWriter(self.path / "events" / f"{_slug(name, limit=120)}.jsonl")

    def events(self) -> Iterator[Event]:
        """Yield what is known so far: the preset, then the events of each shard in the order of writing."""
        with suppress(RecordError):
            preset, origin = self.read_preset()
            yield {"event": "preset", "preset": preset, "origin": origin}
        for path in sorted((self.path / "events").glob("*.jsonl")):
            yield from read_shard(path)

    def record(self) -> RunRecord:
        """Return the record, folded anew from the events; from `run.json` when only that is left.

        Raises:
            RecordError: Neither is there, or `run.json` is damaged.
        """
        from mpx.record.fold import fold
        from mpx.record.model import RunRecord

        if any((self.path / "events").glob("*.jsonl")):
            return fold(self.events())
        if (self.path / "run.json").exists():
            return RunRecord.from_dict(_read_json(self.path / "run.json"))
        return fold(self.events())

    def write_record(self, record: RunRecord) -> None:
        """Write `run.json`.

        Raises:
            RecordError: The disk refuses.
        """
        self._write("run.json", record.to_json())

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise _unwritable(self.path / name, error) from None


def is_run(path: Path) -> bool:
    """Tell whether `path` looks like a run directory."""
    return path.is_dir() and any((path / name).exists() for name in ("preset.json", "run.json", "events"))


def _make_runs(runs: Path) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    ignore = runs.parent / ".gitignore"
    if not ignore.exists():
        write_atomically(ignore, "*\n")


def _make_unique(runs: Path, name: str) -> Path:
    while True:
        path = runs / f"{name}-{os.urandom(2).hex()}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        (path / "events").mkdir()
        return path


def _link_latest(runs: Path, path: Path) -> None:
    # Replaced in one rename, so that `latest` exists at every moment. Some file systems have no links:
    # the newest run then serves (`find_run`).
    temporary = runs / f".latest-{os.urandom(4).hex()}"
    with suppress(OSError):
        temporary.symlink_to(path.name)
        try:
            temporary.replace(runs / "latest")
        except OSError:
            temporary.unlink()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read `{path}`: {error.strerror or error}") from None
    except ValueError as error:
        raise RecordError(f"`{path}` is damaged. Expected JSON. Received: {error}") from None


def _unwritable(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"the run directory cannot be written: `{path}`: {error.strerror or error}",
        hint="name a directory that can be written with `--out`",
    )


def _run_name(target_name: str, level: str) -> str:
    return f"{_slug(target_name.removesuffix('.py'))}-{_slug(level)}"


def _slug(text: str, *, limit: int = 40) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("._")[:limit] or "run"
