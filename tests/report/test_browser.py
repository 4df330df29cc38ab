"""The page in a real browser: no complaint, no empty chart, and values for the pointer and the keys."""

import html
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from mpx.record.fold import fold
from mpx.record.shards import read_shard
from mpx.report import Options, render, with_findings
from mpx.report.charts import charts

EVENTS = Path(__file__).parent.parent / "golden" / "events"
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
DEADLINE_S = 60
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
]  # fmt: skip
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PAPER = {"light": (251, 250, 248), "dark": (21, 22, 26)}  # `--paper` of the style
RUNS = ["everything", "nan-loss", "normal", "nothing"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser here: none of {', '.join(NAMES)} is installed"),
]


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


@pytest.fixture
def browser(tmp_path) -> Browser:
    return Browser(tmp_path)


def page_of(run: str) -> str:
    record = with_findings(fold(read_shard(EVENTS / f"{run}.jsonl")))
    return render(record, Options(unicode=True, run_path=Path("/runs/x")), format_name="html")


def charts_of(run: str) -> list[str]:
    return [chart.id for chart in charts(fold(read_shard(EVENTS / f"{run}.jsonl")))]


def test_a_complaint_of_a_page_is_heard(browser):
    """The law below would hold of a deaf listener too."""
    _, said = browser.open("<body><script>console.error('ouch')</script></body>", "--dump-dom")
    assert "ouch" in said[0]
    loads = page_of("nothing").replace("</body>", "<script>1</script></body>")
    _, said = browser.open(loads, "--dump-dom")
    assert "Content Security Policy" in said[0]


@pytest.mark.parametrize("run", RUNS)
def test_a_page_runs_without_a_word_and_has_its_charts(browser, run):
    dom, said = browser.open(page_of(run), "--dump-dom")
    assert said == []
    assert re.findall(r'<figure id="([^"]*)"', dom) == charts_of(run)
    assert dom.count('class="hit"') == len(charts_of(run))  # the script has come to every one


@pytest.mark.parametrize("run", ["everything", "nan-loss"])
def test_no_chart_is_empty(browser, run):
    script = """[...document.querySelectorAll("figure")].map((figure) => {
        const drawn = [...figure.querySelectorAll("svg .line, svg .mark, svg .bar")].map((e) => e.getBBox());
        const box = figure.querySelector("svg[role=img]").getBoundingClientRect();
        return [figure.id, box.width, box.height, drawn.length, drawn.every((b) => b.width + b.height > 0)];
    })"""
    measured = browser.measure(page_of(run), script)
    assert [name for name, *_ in measured] == charts_of(run)
    for _, width, height, number, visible in measured:
        assert width > 300
        assert height > 50
        assert number > 0
        assert visible


def test_the_arrow_keys_and_the_pointer_read_the_values(browser):
    script = """(() => {
        const plot = document.querySelector("#loss .plot"), svg = plot.querySelector("svg"), told = [];
        const tell = () => told.push(plot.querySelector(".tip").hidden ? null : plot.querySelector(".tip").innerText);
        const press = (key) => { plot.dispatchEvent(new KeyboardEvent("keydown", { key })); tell(); };
        plot.focus();
        for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "Escape"]) press(key);
        const box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top + 50 }));
        tell();
        return [document.activeElement === plot, ...told];
    })()"""
    focused, first, second, back, last, hidden, pointed = browser.measure(page_of("normal"), script)
    assert focused
    assert first == back == "backward pass 1\n4.1929"
    assert second != first
    assert last == pointed == "backward pass 1,200\n1.4919"
    assert hidden is None


def test_a_page_fits_a_narrow_window(browser):
    page = page_of("everything")
    framed = f"<iframe width=360 height=800 srcdoc='{html.escape(POLICY.sub('', page))}'></iframe>"
    asked = (
        "(() => { const d = document.querySelector('iframe').contentDocument.documentElement;"
        " return [d.scrollWidth, d.clientWidth]; })()"
    )
    scrolled, shown = browser.measure(f"<body>{framed}</body>", asked)
    assert scrolled <= shown


@pytest.mark.parametrize(("scheme", "flag"), [("light", 1), ("dark", 0)])
def test_the_page_follows_the_colours_of_the_system(browser, scheme, flag):
    chosen = f"--blink-settings=preferredColorScheme={flag}"
    assert browser.first_pixel(page_of("normal"), chosen) == PAPER[scheme]
