"""Who waited for whom, as a picture: the trainer's phases, and under them how many episodes each worker had in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlflow.report.svg import PHASE_COLORS

WIDTH, LEFT, RIGHT = 1100, 110, 20
BAND, GAP, AXIS = 46, 14, 26
COLUMNS = 500  # of a worker's curve: the mean over each is drawn
OTHER = "#d5dae0"
WAITING = "rollout"  # the trainer's phase in which it waits for episodes

Event = Mapping[str, Any]


def timeline_svg(events: Sequence[Event]) -> str:
    """SVG text of the events of `trace.trace_events`: a band of the trainer, a band of each process that plays episodes. The
    shares of the whole time in which each had nothing to do stand beside them."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    length = max((event["ts"] + event["dur"] for event in spans), default=1) or 1
    bands, legend = [], dict[str, str]()
    for place, (pid, name) in enumerate(sorted(names.items())):
        own = [event for event in spans if event["pid"] == pid]
        top = GAP + place * (BAND + GAP)
        if place == 0:
            legend = {event["name"]: PHASE_COLORS.get(event["name"], OTHER) for event in own}
            drawn, idle = (
                _phases(own, length, top),
                _share([event for event in own if event["name"] == WAITING], length),
            )
            told = f"waits {idle:.0%}"
        else:
            load = episodes_in_flight(own, length, COLUMNS)
            drawn, told = _curve(load, top), f"empty {sum(value == 0 for value in load) / COLUMNS:.0%}"
        bands.append(
            f'<text x="4" y="{top + 20}" font-weight="bold">{escape(name)}</text><text x="4" y="{top + 36}">{told}</text>'
        )
        bands.append(drawn)
    height = GAP + len(names) * (BAND + GAP) + AXIS + 18
    bands += [_axis(length, height - AXIS - 18), _legend(legend, height - 6)]
    style = 'font-family="DejaVu Sans, sans-serif" font-size="11" fill="#1f2933"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *bands, "</svg>\n"])


def episodes_in_flight(spans: Sequence[Event], length: float, columns: int) -> list[float]:
    """The mean number of spans that are under way in each of `columns` equal parts of the time, from 0 to `length`."""
    width, load = length / columns, [0.0] * columns
    for span in spans:
        begin, end = span["ts"] / width, (span["ts"] + span["dur"]) / width
        for column in range(int(begin), min(columns, int(end) + 1)):
            load[column] += max(0.0, min(end, column + 1) - max(begin, column))
    return load


def _share(spans: Sequence[Event], length: float) -> float:
    return sum(span["dur"] for span in spans) / length


def _x(at: float, length: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / length


def _phases(spans: Sequence[Event], length: float, top: int) -> str:
    drawn = []
    for span in spans:
        left, right = _x(span["ts"], length), _x(span["ts"] + span["dur"], length)
        color, title = PHASE_COLORS.get(span["name"], OTHER), escape(f"{span['name']} {span['dur'] / 1e6:.1f} s")
        drawn.append(
            f'<rect x="{left:.1f}" y="{top}" width="{max(0.3, right - left):.1f}" height="{BAND}" fill="{color}">'
            f"<title>{title}</title></rect>"
        )
    return "\n".join(drawn)


def _curve(load: Sequence[float], top: int) -> str:
    most, step = max(load) or 1.0, (WIDTH - LEFT - RIGHT) / len(load)
    points = [f"{LEFT + place * step:.1f},{top + BAND * (1 - value / most):.1f}" for place, value in enumerate(load)]
    ends = f"{LEFT},{top + BAND} {' '.join(points)} {WIDTH - RIGHT},{top + BAND}"
    title = f"<title>at most {most:.0f} episodes</title>"
    return f'<polygon points="{ends}" fill="{PHASE_COLORS[WAITING]}" opacity="0.75">{title}</polygon>'


def _axis(length: float, top: int) -> str:
    marks = [(_x(length * part / 4, length), length * part / 4e6) for part in range(5)]
    return "\n".join(f'<text x="{x:.0f}" y="{top + 14}" text-anchor="middle">{seconds:.0f} s</text>' for x, seconds in marks)


def _legend(colors: Mapping[str, str], y: int) -> str:
    drawn, x = [], LEFT
    for name, color in colors.items():
        text = f"{name} (waits for episodes)" if name == WAITING else name
        drawn.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/><text x="{x + 14}" y="{y}">{escape(text)}</text>'
        )
        x += 30 + 7 * len(text)
    return "\n".join(drawn)
