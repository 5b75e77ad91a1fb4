"""Line charts as SVG, made without a plotting package; studies, benchmarks and reports draw with it.

    chart("title", [Panel("panel", "x", "y", [Line("measured", [(1, 2.5), (2, 3.0)])])])  ->  the text of an .svg file

A name has the same colour in every panel, and one legend is enough for all of them. Where a line has few points, each
shows its numbers when a mouse rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Point = tuple[float, float]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#5f5f5f")
"""Of lines, in the order of their names; colour-blind people can tell them apart (Okabe and Ito)."""
FONT = "font-family='Helvetica, Arial, sans-serif'"
WIDTH, HEIGHT = 400, 300  # of a panel with its labels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46  # around its plot
FEW = 60  # points of a line that are marked one by one
WIDE_NAME = 7  # of a letter in the legend, roughly


@dataclass(frozen=True)
class Line:
    """One curve. A point that is not finite leaves a gap."""

    name: str
    points: Sequence[Point]
    dashed: bool = False  # what is expected, beside what is measured


@dataclass(frozen=True)
class Panel:
    """One plot of a chart."""

    title: str
    x: str  # what its axes show
    y: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False


@dataclass(frozen=True)
class Axis:
    """From values to places between 0 and 1."""

    low: float
    high: float
    log: bool
    ticks: Sequence[float]

    def place(self, value: float) -> float:
        low, high, value = (math.log(end) if self.log else end for end in (self.low, self.high, value))
        return (value - low) / (high - low)

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)


def chart(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """The text of an SVG picture with all panels, row by row."""
    columns = max(1, min(columns, len(panels)))
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    dashed = {line.name for panel in panels for line in panel.lines if line.dashed}
    width = columns * WIDTH
    legend, head = _legend(names, colours, dashed, width)
    height = head + -(-len(panels) // columns) * HEIGHT
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(LEFT, 24, title, size=15, bold=True),
        *legend,
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f"<g transform='translate({column * WIDTH},{head + row * HEIGHT})'>")
        parts += _panel(panel, colours)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def axis(values: Iterable[float], log: bool) -> Axis:
    """An axis that shows all these values, with a little room around them. Few values of a logarithmic one are its
    ticks."""
    shown = sorted({value for value in values if math.isfinite(value) and (value > 0 or not log)}) or [1.0]
    low, high = shown[0], shown[-1]
    if log:
        room = max((high / low) ** 0.04, 1.02)
        low, high = low / room, high * room
        return Axis(low, high, True, shown if len(shown) <= 8 else log_ticks(low, high))
    room = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    low, high = low - room, high + room
    return Axis(low, high, False, linear_ticks(low, high))


def linear_ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers in between."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(size * power for size in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (size * power) <= 7)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in between, or with 2 and 5 times them; of a narrow range, what a linear axis has."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for sizes in ((1,), (1, 2, 5)):
        ticks = [tick for power in powers for size in sizes if low <= (tick := size * 10.0**power) <= high]
        if len(ticks) >= 3:
            return ticks
    return [tick for tick in linear_ticks(low, high) if tick > 0]


def short(value: float) -> str:
    """A number as a label."""
    value = float(f"{value:.6g}")
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-3:
        mantissa, _, power = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(power)}" if power else mantissa
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e6 if letter == 'M' else 1e3):g}{letter}"
    return f"{value:g}"


def _panel(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    across = axis((x for line in panel.lines for x, _ in line.points), panel.x_log)
    upwards = axis((y for line in panel.lines for _, y in line.points), panel.y_log)

    def place(point: Point) -> Point:
        x, y = across.place(point[0]), upwards.place(point[1])
        return round(LEFT + plot_width * x, 2), round(TOP + plot_height * (1 - y), 2)

    yield _text(LEFT, TOP - 12, panel.title, size=13, bold=True)
    for tick in across.ticks:
        x, _ = place((tick, upwards.low))
        yield _rule(x, TOP, x, TOP + plot_height)
        yield _text(x, TOP + plot_height + 16, short(tick), anchor="middle")
    for tick in upwards.ticks:
        _, y = place((across.low, tick))
        yield _rule(LEFT, y, LEFT + plot_width, y)
        yield _text(LEFT - 7, y + 4, short(tick), anchor="end")
    yield _rule(LEFT, TOP + plot_height, LEFT + plot_width, TOP + plot_height, "#333333")
    yield _rule(LEFT, TOP, LEFT, TOP + plot_height, "#333333")
    yield _text(LEFT + plot_width / 2, HEIGHT - 10, panel.x, anchor="middle")
    middle = TOP + plot_height / 2
    yield _text(14, middle, panel.y, anchor="middle", turned=True)
    drawn = False
    for line in panel.lines:
        runs = list(_runs(line.points, across, upwards))
        drawn = drawn or bool(runs)
        yield f"<g><title>{escape(line.name)}</title>"
        for run in runs:
            yield _curve([place(point) for point in run], colours[line.name], line.dashed)
            if not line.dashed and len(line.points) <= FEW:
                yield from _marks(line.name, run, [place(point) for point in run], colours[line.name])
        yield "</g>"
    if not drawn:
        yield _text(LEFT + plot_width / 2, middle, "nothing was measured", anchor="middle")


def _runs(points: Sequence[Point], across: Axis, upwards: Axis) -> Iterator[list[Point]]:
    """The parts of a line between its gaps."""
    run: list[Point] = []
    for x, y in points:
        if across.shows(x) and upwards.shows(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _curve(places: list[Point], colour: str, dashed: bool) -> str:
    points = " ".join(f"{x:g},{y:g}" for x, y in places)
    dashes = " stroke-dasharray='5 4'" if dashed else ""
    return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.8'{dashes}/>"


def _marks(name: str, points: list[Point], places: list[Point], colour: str) -> Iterator[str]:
    for (x, y), (across, down) in zip(points, places, strict=True):
        words = escape(f"{name}: {x:.6g}, {y:.6g}")
        yield f"<circle cx='{across:g}' cy='{down:g}' r='2.6' fill='{colour}'><title>{words}</title></circle>"


def _legend(names: list[str], colours: dict[str, str], dashed: set[str], width: int) -> tuple[list[str], int]:
    """Its parts, and the height of everything above the panels."""
    parts, x, y = [], LEFT, 46
    for name in names if len(names) > 1 else []:
        room = 34 + WIDE_NAME * len(name)
        if x > LEFT and x + room > width:
            x, y = LEFT, y + 18
        parts.append(_curve([(x, y - 4), (x + 18, y - 4)], colours[name], name in dashed))
        parts.append(_text(x + 23, y, name))
        x += room
    return parts, y + 14 if parts else 36


def _rule(x: float, y: float, to_x: float, to_y: float, colour: str = "#e4e4e4") -> str:
    return f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{colour}'/>"


def _text(
    x: float, y: float, words: str, size: int = 11, anchor: str = "start", bold: bool = False, turned: bool = False
) -> str:
    weight = " font-weight='bold'" if bold else ""
    turn = f" transform='rotate(-90 {x:g} {y:g})'" if turned else ""
    place = f"x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}'"
    return f"<text {place} {FONT} fill='#222222'{weight}{turn}>{escape(words)}</text>"
