"""Charts are SVG that holds the data: every point where its axes say, every name in words."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.figure import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, Panel, axis, chart, short

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-6)


def parse(panels, **options):
    return ElementTree.fromstring(chart("a title", panels, **options))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def test_each_point_is_where_the_axes_say():
    """From the place of two ticks follows that of every other value."""
    points = [(1, 10.0), (2, 20.0), (4, 15.0)]
    root = parse([Panel("p", "x", "y", [Line("measured", points)])])
    labels = {
        (element.get("text-anchor"), element.text): (float(element.get("x")), float(element.get("y")))
        for element in root.iter(f"{SVG}text")
    }
    ten, twenty = labels["end", "10"][1] - 4, labels["end", "20"][1] - 4
    one, four = labels["middle", "1"][0], labels["middle", "4"][0]
    marks = [(float(mark.get("cx")), float(mark.get("cy"))) for mark in root.iter(f"{SVG}circle")]
    for (x, y), (across, down) in zip(points, marks, strict=True):
        assert across == pytest.approx(one + (x - 1) / 3 * (four - one), abs=0.02)
        assert down == pytest.approx(ten + (y - 10) / 10 * (twenty - ten), abs=0.02)
    (curve,) = [line for line in root.iter(f"{SVG}polyline")]
    assert [tuple(map(float, place.split(","))) for place in curve.get("points").split()] == marks
    assert [mark.find(f"{SVG}title").text for mark in root.iter(f"{SVG}circle")] == [
        f"measured: {x:g}, {y:g}" for x, y in points
    ]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=80), st.booleans(), st.booleans())
def test_everything_that_can_be_shown_lies_within_the_plot(points, x_log, y_log):
    root = parse([Panel("p", "x", "y", [Line("one", points)], x_log, y_log)])
    shown = [point for point in points if (point[0] > 0 or not x_log) and (point[1] > 0 or not y_log)]
    places = [place for curve in root.iter(f"{SVG}polyline") for place in curve.get("points").split()]
    assert len(places) == len(shown)
    for x, y in (map(float, place.split(",")) for place in places):
        assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM


def test_a_gap_divides_a_line():
    points = [(1, 1.0), (2, math.nan), (3, 2.0), (4, math.inf), (5, 3.0)]
    root = parse([Panel("p", "x", "y", [Line("one", points)])])
    assert len(list(root.iter(f"{SVG}polyline"))) == 3


def test_names_are_told_once_for_all_panels_and_keep_their_colour():
    panels = [Panel("p", "x", "y", [Line(name, [(1, 1)]) for name in names]) for names in (("a", "b<c&d"), ("b<c&d",))]
    root = parse(panels)
    assert texts(root).count("b<c&d") == 1
    marks = {mark.find(f"{SVG}title").text: mark.get("fill") for mark in root.iter(f"{SVG}circle")}
    assert marks["a: 1, 1"] != marks["b<c&d: 1, 1"]
    assert len({mark.get("fill") for mark in root.iter(f"{SVG}circle")}) == 2


def test_a_panel_without_data_says_so():
    assert "nothing was measured" in texts(parse([Panel("p", "x", "y", [Line("one", [(1, math.nan)])])]))


def test_few_values_of_a_logarithmic_axis_are_its_ticks():
    assert axis([32, 512, 128], log=True).ticks == [32, 128, 512]
    assert axis([float(value) for value in range(1, 1001)], log=True).ticks == [1, 10, 100, 1000]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))
def test_an_axis_has_three_to_eight_ticks_within_it(low, width):
    found = axis([low, low + width], log=False)
    assert 3 <= len(found.ticks) <= 8
    assert all(found.low <= tick <= found.high for tick in found.ticks)


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (0.1 + 0.2, "0.3"), (1500, "1500"), (20_000, "20k"), (2.5e6, "2.5M"), (1e-5, "1e-5"), (-4e10, "-4e10")],
)
def test_numbers_are_short(value, label):
    assert short(value) == label
