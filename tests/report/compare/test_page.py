"""The page of a comparison: what it says, and that a real browser shows its curves over one another."""

import math
import re

import pytest

from mpx.record import RunRecord
from mpx.record.parts import LossCurve, Memory, Steps, StepTime, Throughput
from mpx.report import Options
from mpx.report.compare import Comparison, Settings, Trial, compare, show
from mpx.report.compare.charts import comparison_charts

PASSES = list(range(1, 201))
PAPER = {"light": (251, 250, 248), "dark": (21, 22, 26)}  # `--paper` of the style


def trial(level: str, ms: float, bend: float = 0.0) -> Trial:
    """A run whose loss falls and, from pass 120 on, is `bend` above what it would be."""
    values = [1.0 / (1 + 0.05 * at) + (bend if at > 120 else 0.0) for at in PASSES]
    record = RunRecord(
        preset={"name": level}, status="completed", exit_code=0, backwards=200, steps=Steps(200, 200),
        losses=[LossCurve("t.py:1", PASSES, values)], throughput=Throughput(1000 / ms, StepTime(ms, ms)),
        memory=Memory(1000, "cpu"),
    )  # fmt: skip
    return Trial(level, record)


def judged() -> Comparison:
    levels = [trial("O0", 20.0), trial("O1", 10.0), trial("O2", 9.0, 0.5), trial("<b>.yaml", 8.0, math.nan)]
    return compare(levels, Settings())


def page(comparison: Comparison) -> str:
    return show(comparison, Options(), format_name="html")


def test_the_verdict_with_its_reason_comes_first_and_then_what_rules_levels_out():
    text = page(judged())
    assert '<header class="is-ok"><h1>mpx compare <b>take O1</b>' in text
    items = re.findall(r'<li class="is-(\w+)"><b class="word">(\w+)</b><div><p>(.*?)</p>', text)
    assert [(state, word) for state, word, _ in items] == [
        ("ok", "verdict"),
        ("error", "error"),
        ("error", "error"),
    ]
    assert "a step is 2.00 times as fast" in items[0][2]
    assert "<code>O2</code>: divergence" in items[1][2]
    assert "<b>.yaml" not in text  # a name is text, whatever is in it
    assert "http" not in re.sub("http-equiv|http://www.w3.org/2000/svg", "", text)  # it loads nothing


def test_staying_and_no_verdict_are_told_apart():
    stay = page(compare([trial("O0", 20.0), trial("O1", 20.0)], Settings()))
    assert '<header class="is-info"><h1>mpx compare <b>stay on O0</b>' in stay
    none = page(
        compare([Trial("O0", RunRecord(status="failed", exit_code=1)), trial("O1", 20.0)], Settings())
    )
    assert '<header class="is-error"><h1>mpx compare <b>no verdict</b>' in none


def test_the_curves_are_those_of_the_comparison_and_what_was_found_is_marked_on_them():
    comparison = judged()
    losses, gaps = comparison_charts(comparison)
    assert [line.name for line in losses.plot.lines] == ["O0", "O1", "O2", "<b>.yaml"]
    assert [line.name for line in gaps.plot.lines] == ["O0", "O1", "O2", "<b>.yaml"]  # each keeps its colour
    of_o2 = comparison.levels[2]
    assert losses.plot.lines[2].points == tuple(zip(of_o2.passes, of_o2.curve, strict=True))
    (mark,) = losses.plot.marks  # where the loss is not finite there is nothing to mark it on
    assert (mark.x, mark.text) == (comparison.issues[0].at, "O2: divergence begins")
    assert gaps.plot.lines[2].points[-1] == (200.0, of_o2.final_gap)
    assert all(y == 0 for _, y in gaps.plot.lines[0].points)


def test_without_a_loss_there_is_a_page_without_charts():
    empty = [Trial(level, RunRecord(status="completed", exit_code=0)) for level in ("O0", "O1")]
    assert comparison_charts(compare(empty, Settings())) == []
    assert "<figure" not in page(compare(empty, Settings()))


@pytest.mark.slow
def test_a_browser_shows_it_whole_and_without_a_word(browser):
    text = page(judged())
    dom, said = browser.open(text, "--dump-dom")
    assert said == []
    assert dom.count('class="hit"') == 2  # the script has come to both charts
    measured = browser.measure_charts(text)
    assert [(name, visible) for name, *_, visible in measured] == [("losses", True), ("gaps", True)]
    assert all(width > 300 and height > 50 and number >= 4 for _, width, height, number, _ in measured)
    assert browser.overhang(text, width=360) <= 0


@pytest.mark.slow
def test_the_keys_read_the_values_of_all_levels(browser):
    script = """(() => {
        const plot = document.querySelector("#losses .plot");
        plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
        return plot.querySelector(".tip").innerText.split("\\n");
    })()"""
    first = judged().levels[0].curve[0]
    told = browser.measure(page(judged()), script)
    assert told == ["backward pass 1", *(f"{level}: {first:.5g}" for level in ("O0", "O1", "O2", "<b>.yaml"))]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "flag"), [("light", 1), ("dark", 0)])
def test_it_follows_the_colours_of_the_system(browser, scheme, flag):
    assert (
        browser.first_pixel(page(judged()), f"--blink-settings=preferredColorScheme={flag}") == PAPER[scheme]
    )
