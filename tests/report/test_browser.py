"""The page in a real browser: no complaint, no empty chart, and values for the pointer and the keys."""

import re
from pathlib import Path

import pytest

from mpx.record.fold import fold
from mpx.record.shards import read_shard
from mpx.report import Options, render, with_findings
from mpx.report.charts import charts

EVENTS = Path(__file__).parent.parent / "golden" / "events"
PAPER = {"light": (251, 250, 248), "dark": (21, 22, 26)}  # `--paper` of the style
RUNS = ["everything", "nan-loss", "normal", "nothing"]

pytestmark = pytest.mark.slow


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
    measured = browser.measure_charts(page_of(run))
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
    assert browser.overhang(page_of("everything"), width=360) <= 0


@pytest.mark.parametrize(("scheme", "flag"), [("light", 1), ("dark", 0)])
def test_the_page_follows_the_colours_of_the_system(browser, scheme, flag):
    chosen = f"--blink-settings=preferredColorScheme={flag}"
    assert browser.first_pixel(page_of("normal"), chosen) == PAPER[scheme]
