"""Runs the scripts that were written for apex, one after the other in one process: `apex` or `plain`."""

import runpy
import sys
from pathlib import Path

ASKS = {
    "apex_images.py": ["--opt-level", "O2", "--keep-batchnorm-fp32", "True", "--loss-scale", "128.0"],
    "apex_players.py": ["--opt-level", "O1"],
    "apex_text.py": ["--fp16"],
}
way = sys.argv[1]
for name, options in ASKS.items():
    sys.argv = [name, *(options if way == "apex" else [])]
    runpy.run_path(str(Path(__file__).parent / name), run_name="__main__")
