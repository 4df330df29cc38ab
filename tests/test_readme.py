"""What the README says is so: its files, commands and levels exist, and the report that it shows is one of the demo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpx.cli import cli
from mpx.presets import list_presets, resolve

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def test_every_make_target_that_is_named_exists() -> None:
    named = set(re.findall(r"`?\bmake ([a-z-]+)`", README)) | set(
        re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    )
    rules = set(
        re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert named
    assert named <= rules


def test_every_option_that_is_named_is_one_of_mpx() -> None:
    commands = {name: cli.get_command(None, name) for name in cli.list_commands(None)}  # type: ignore[arg-type]
    known = {
        option for c in commands.values() if c for p in c.params for option in (*p.opts, *p.secondary_opts)
    }
    used = set()
    for line in re.findall(r"^mpx run (.*)$", README, re.MULTILINE):
        target = re.search(r"\S+\.py|-m \S+| -- ", line)
        used |= set(re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)", line[: target.start()] if target else line))
    used |= set(re.findall(r"`(--[a-z][\w-]*)", README))
    assert used
    assert used <= known


def test_the_table_of_levels_agrees_with_the_presets() -> None:
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in README.splitlines()
            if line.startswith("| ")
        )
    }
    levels = [
        cell
        for cell in next(line for line in README.splitlines() if line.startswith("| | O0")).split()
        if cell != "|"
    ]
    assert levels == [preset.name for preset in list_presets() if "-" not in preset.name]
    for level, scale, weights in zip(
        levels, rows["loss scale in float16"], rows["weights that the script sees"], strict=True
    ):
        policy = resolve(level, overrides=[], cwd=REPOSITORY / "tests").policy
        assert scale == policy.loss_scale.mode
        assert weights.startswith("half" if policy.master_weights is False else "FP32")


def test_the_report_shown_is_one_of_the_demo() -> None:
    shown = README.split("```text\n")[1].split("```")[0]
    demo = re.search(r"--steps (\d+)", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert demo is not None
    assert shown.startswith(f"mpx  O1 float16 | scripts/train_gpt.py | {demo[1]} steps")
    assert len(shown.splitlines()) <= 18


def test_the_quick_commands_of_the_readme_run(tmp_path: Path) -> None:
    for command in re.findall(r"^(mpx presets (?:list|show).*)$", README, re.MULTILINE):
        finished = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout
