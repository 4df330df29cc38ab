"""A real browser, for pages."""

import html
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
DEADLINE_S = 60
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
]  # fmt: skip
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


class Browser:
    """Opens pages, each in a profile of its own."""

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self, page: str, *flags: str) -> tuple[str, list[str]]:
        """Return what the browser prints about a page once it is loaded, and what the page's console says."""
        number = len(list(self.folder.iterdir()))
        path = self.folder / f"{number}.html"
        path.write_text(page, encoding="utf-8")
        profile = f"--user-data-dir={self.folder / f'profile-{number}'}"
        command = [BROWSER, *FLAGS, profile, *flags, path.as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True, cwd=self.folder)
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
        return done.stdout.decode(), said

    def measure(self, page: str, script: str):
        """Return what an expression of a page's script is worth after loading; for that the policy must go."""
        answer = f"document.body.dataset.answer = JSON.stringify({script})"
        asked = f"<script>addEventListener('load', () => {answer})</script>"
        dom, said = self.open(POLICY.sub("", page).replace("</body>", f"{asked}</body>"), "--dump-dom")
        assert said == []
        return json.loads(html.unescape(re.search(r'data-answer="([^"]*)"', dom)[1]))

    def first_pixel(self, page: str, *flags: str) -> tuple[int, ...]:
        """Return the colour of the upper left corner of a screenshot."""
        self.open(page, "--screenshot=page.png", "--window-size=1000,1400", *flags)
        data, at, packed = (self.folder / "page.png").read_bytes(), 8, b""
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            if data[at + 4 : at + 8] == b"IDAT":
                packed += data[at + 8 : at + 8 + size]
            at += 12 + size
        return tuple(
            zlib.decompress(packed)[1:4]
        )  # before it only the filter of the line, which leaves it alone

    def measure_charts(self, page: str) -> list[list]:
        """Return of each chart its id, width, height, number of shapes, and whether each of them can be seen."""
        script = """[...document.querySelectorAll("figure")].map((figure) => {
            const drawn = [...figure.querySelectorAll("svg .line, svg .mark, svg .bar")].map((e) => e.getBBox());
            const box = figure.querySelector("svg[role=img]").getBoundingClientRect();
            return [figure.id, box.width, box.height, drawn.length, drawn.every((b) => b.width + b.height > 0)];
        })"""
        return self.measure(page, script)

    def overhang(self, page: str, width: int) -> int:
        """Return by how many pixels a page is wider than a window of `width`."""
        framed = f"<iframe width={width} height=800 srcdoc='{html.escape(POLICY.sub('', page))}'></iframe>"
        asked = (
            "(() => { const d = document.querySelector('iframe').contentDocument.documentElement;"
            " return d.scrollWidth - d.clientWidth; })()"
        )
        return self.measure(f"<body>{framed}</body>", asked)


@pytest.fixture
def browser(tmp_path) -> Browser:
    if BROWSER is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} is installed")
    return Browser(tmp_path)
