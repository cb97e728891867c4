"""Pictures as SVG text, without a plotting library: lines over a logarithmic axis, dots with error bars, several such pictures
in one, and maps of numbers between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

#: ``(value, low, high)``: a number, and the ends of its error bar.
Dot = tuple[float, float, float]

COLOURS = ("#6b7280", "#2563eb", "#0a7d3c", "#d97706", "#9333ea", "#dc2626")
_INK, _FAINT = "#374151", "#e5e7eb"
#: Light to dark: what a map's numbers from 0 to 1 are painted with.
_SHADES = ("#f3f4f6", "#d1ead9", "#a3d5b5", "#6bbb8c", "#329e63", "#0a7d3c", "#065127")


def shade(value: float) -> str:
    """The colour of a number between 0 and 1."""
    return _SHADES[min(len(_SHADES) - 1, max(0, round(value * (len(_SHADES) - 1))))]


def _steps(low: float, high: float) -> list[float]:
    """Round numbers, at most a handful, from below ``low`` to above ``high``."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    for factor in (1.0, 2.0, 5.0, 10.0):
        if (high - low) / (step * factor) <= 5:
            step *= factor
            break
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step) + 1)]


def tokens(n: float) -> str:
    """A number of tokens for an axis: 512, 4k, 128k."""
    return f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}"


def _open(title: str, width: int, height: int, left: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-size="12" '
        f'font-family="system-ui,sans-serif" fill="{_INK}" role="img" aria-label="{escape(title, quote=True)}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-size="13" font-weight="600">{escape(title)}</text>',
    ]


def _axes(
    ticks: Sequence[float],
    y: Callable[[float], float],
    columns: Sequence[tuple[float, str]],
    labels: tuple[str, str],
    box: tuple[int, int, int, int],
    height: int,
) -> list[str]:
    """``columns``: where on the x axis stands what; ``labels`` of x and y; ``box``: left, right, top and bottom of the plot."""
    left, right, top, bottom = box
    out = [
        f'<line x1="{left}" x2="{right}" y1="{y(at):.1f}" y2="{y(at):.1f}" stroke="{_FAINT}"/>'
        f'<text x="{left - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>'
        for at in ticks
    ]
    last = -math.inf
    for x, name in columns:
        if x - last >= 34:  # labels that would touch are left out
            out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(name)}</text>')
            last = x
    out.append(
        f'<text x="{(left + right) / 2}" y="{height - 10}" text-anchor="middle">{escape(labels[0])}</text>'
        f'<text transform="translate(14 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">{escape(labels[1])}</text>'
    )
    return out


def _empty(width: int) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 40"><text y="20">no data</text></svg>'


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    width: int = 640,
    height: int = 340,
    zero: bool = True,
) -> str:
    """An SVG with one line per name over a base-2 logarithmic x axis: ``series[name]`` are ``(x, y)`` points, x > 0.

    ``zero`` has the y axis start at 0. Names stand beside the lines' last points, apart.
    """
    points = [p for line in series.values() for p in line]
    left, right, top, bottom = 62, width - 150, 40, height - 52
    if not points:
        return _empty(width)
    xs = sorted({x for x, _ in points})
    ticks = _steps(0.0 if zero else min(y for _, y in points), max(y for _, y in points))
    a, b = math.log2(xs[0]), math.log2(xs[-1])

    def px(x: float) -> float:
        return left + (right - left) * ((math.log2(x) - a) / (b - a) if b > a else 0.5)

    py = _scale(ticks, top, bottom)
    out = _open(title, width, height, left)
    out += _axes(ticks, py, [(px(x), tokens(x)) for x in xs], (x_label, y_label), (left, right, top, bottom), height)
    labels: list[tuple[float, str, str]] = []
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = sorted(line)
        if not line:
            continue
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [
            f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"><title>{escape(name)}: {x:g}, {y:.4g}</title></circle>'
            for x, y in line
        ]
        labels.append((py(line[-1][1]), name, colour))
    floor = -math.inf
    for y, name, colour in sorted(labels):
        floor = max(y, floor + 15)
        out.append(f'<text x="{right + 10}" y="{floor + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join(out) + "</svg>\n"


def dots(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Dot | None]],
    *,
    x_label: str,
    y_label: str,
    ticks: Sequence[float] | None = None,
    width: int = 460,
    height: int = 300,
) -> str:
    """An SVG with a column per group and in it, side by side, a dot per name: ``series[name][i]`` is that of ``groups[i]``.

    A dot whose ``low`` and ``high`` differ has an error bar between them; None is left out. ``ticks`` are the y axis' numbers,
    ascending, the ends among them; by default they are fitted to the dots.
    """
    shown = [dot for row in series.values() for dot in row if dot is not None]
    left, right, top, bottom = 62, width - 16, 58, height - 52
    if not shown:
        return _empty(width)
    if ticks is None:
        low, high = min(dot[1] for dot in shown), max(dot[2] for dot in shown)
        spare = max(0.0, 0.02 * max(abs(low), abs(high)) - (high - low)) / 2  # what is all but equal looks equal
        ticks = _steps(low - spare, high + spare)
    py, column = _scale(ticks, top, bottom), (right - left) / len(groups)
    out = _open(title, width, height, left)
    columns = [(left + (i + 0.5) * column, name) for i, name in enumerate(groups)]
    out += _axes(ticks, py, columns, (x_label, y_label), (left, right, top, bottom), height)
    apart, key = min(14.0, column / (len(series) + 1)), float(left)
    for i, (name, row) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        out.append(
            f'<rect x="{key:.1f}" y="31" width="9" height="9" fill="{colour}"/>'
            f'<text x="{key + 14:.1f}" y="40" fill="{colour}">{escape(name)}</text>'
        )
        key += 34 + 6.6 * len(name)
        for (middle, group), dot in zip(columns, row, strict=True):
            if dot is None:
                continue
            x, (value, low, high) = middle + (i - (len(series) - 1) / 2) * apart, dot
            said = f"{name}, {group}: {value:.4g}" + (f" ({low:.4g} to {high:.4g})" if high > low else "")
            if high > low:
                out.append(
                    f'<path d="M{x:.1f},{py(low):.1f}V{py(high):.1f}m-4,0h8M{x - 4:.1f},{py(low):.1f}h8" stroke="{colour}"/>'
                )
            out.append(
                f'<circle cx="{x:.1f}" cy="{py(value):.1f}" r="4" fill="{colour}"><title>{escape(said)}</title></circle>'
            )
    return "".join(out) + "</svg>\n"


def _scale(ticks: Sequence[float], top: int, bottom: int) -> Callable[[float], float]:
    """From a number on the y axis to where it stands."""
    low, high = ticks[0], ticks[-1]
    return lambda y: bottom - (bottom - top) * (y - low) / ((high - low) or 1.0)


def grid(title: str, panels: Sequence[str], *, columns: int = 2, width: int = 460, height: int = 300) -> str:
    """An SVG with a title over ``panels``, SVGs of ``width`` x ``height``, row by row."""
    columns = max(1, min(columns, len(panels)))
    out = _open(title, columns * width, 36 + -(-len(panels) // columns) * height, 16)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        out.append(panel.replace("<svg ", f'<svg x="{column * width}" y="{36 + row * height}" height="{height}" ', 1))
    return "".join(out) + "</svg>\n"


def heat_map(
    rows: Sequence[tuple[str, Sequence[float]]], *, x_label: str, cell: int = 9, label: str = "", most: str = "1"
) -> str:
    """An SVG map: a row per name, a cell per number between 0 and 1, light to dark; ``most`` is what 1 stands for."""
    if not rows:
        return ""
    columns, name_width = max(len(row) for _, row in rows), 8 + 6.4 * max(len(name) for name, _ in rows)
    tall = max(cell, 11)
    width, height = name_width + max(columns * cell, 5.6 * len(x_label)) + 10, len(rows) * tall + 46
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" font-size="10" '
        f'font-family="system-ui,sans-serif" fill="{_INK}" role="img" aria-label="{escape(label or x_label, quote=True)}">'
    ]
    for i, (name, row) in enumerate(rows):
        y = i * tall
        out.append(f'<text x="{name_width - 6:.0f}" y="{y + tall - 2}" text-anchor="end">{escape(name)}</text>')
        out += [
            f'<rect x="{name_width + j * cell:.1f}" y="{y}" width="{cell - 1}" height="{tall - 1}" fill="{shade(value)}">'
            f"<title>{escape(name)}, {j}: {value:.3g}</title></rect>"
            for j, value in enumerate(row)
        ]
    floor = len(rows) * tall
    out.append(f'<text x="{name_width:.0f}" y="{floor + 14}">{escape(x_label)}</text>')
    out += [
        f'<rect x="{name_width + 14 + i * 14:.0f}" y="{floor + 24}" width="14" height="10" fill="{colour}"/>'
        for i, colour in enumerate(_SHADES)
    ]
    end = name_width + 14 + 14 * len(_SHADES)
    out.append(
        f'<text x="{name_width:.0f}" y="{floor + 33}">0</text><text x="{end + 5:.0f}" y="{floor + 33}">{escape(most)}</text></svg>'
    )
    return "".join(out)
