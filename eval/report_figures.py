"""What a figure of a report shows, and drawing it: nothing else is needed to draw one."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "error")
WIDE_RANGE = 10.0  # perplexities that differ by more than this factor get a logarithmic axis
MARKED = 40  # points of a line up to which each is marked
INSIDE = 5  # lines whose names still fit into the plot


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a figure, and the record it came from: `run/file.jsonl:line`."""

    x: int | float
    y: int | float
    source: str
    error: float | None = None  # standard error of y


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a figure, in order of x."""

    name: str
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure's data and labels."""

    key: str  # file name
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    percent_x: bool = False  # fractions, shown as per cent
    percent_y: bool = False


def series_from(rows: Iterable[tuple[str, Point]]) -> tuple[Series, ...]:
    """Points by the name of their series, each in order of x."""
    lines: dict[str, list[Point]] = {}
    for name, point in rows:
        lines.setdefault(name, []).append(point)
    return tuple(
        Series(name, tuple(sorted(points, key=lambda p: p.x))) for name, points in lines.items()
    )


def file_key(*parts: str) -> str:
    """A file name of letters, digits, `-` and `_`."""
    joined = "-".join(parts)
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in joined)


def unit_label(metric: str) -> str:
    """The axis of a metric: its name and which way is better."""
    return f"{metric} ({'lower' if is_lower_better(metric) else 'higher'} is better)"


def is_lower_better(metric: str) -> bool:
    """Whether a smaller value of the metric is the better one."""
    return any(name in metric for name in LOWER_IS_BETTER)


def spans_decades(metric: str, series: Iterable[Series]) -> bool:
    """Whether a perplexity axis must be logarithmic for its small values to be told apart."""
    values = [point.y for line in series for point in line.points]
    return is_lower_better(metric) and min(values) > 0 and max(values) > WIDE_RANGE * min(values)


def over_sparsity(key: str, title: str, metric: str, series: tuple[Series, ...]) -> Figure:
    """A quality over the FLOPs that were skipped."""
    return Figure(
        key=key,
        title=title,
        x_label="FLOPs skipped, of the routable ones",
        y_label=unit_label(metric),
        series=series,
        log_y=spans_decades(metric, series),
        percent_x=True,
    )


def draw(figure: Figure, path: Path) -> None:
    """Draw one figure as SVG; the same figure gives the same bytes. Needs the `eval` extra."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "wide-jax"}):
        from matplotlib.figure import Figure as Canvas
        from matplotlib.ticker import LogLocator, PercentFormatter, ScalarFormatter

        crowded = len(figure.series) > INSIDE
        canvas = Canvas(figsize=(9 if crowded else 7, 4.2), layout="constrained")
        axes = canvas.subplots()
        for series in figure.series:
            x, y = [p.x for p in series.points], [p.y for p in series.points]
            bars = [p.error or 0.0 for p in series.points] if _has_errors(series) else None
            marker = "o" if len(x) <= MARKED else None
            axes.errorbar(
                x, y, yerr=bars, marker=marker, markersize=4, capsize=2, label=series.name
            )
        if figure.log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
        if figure.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter("")
        for asked, axis in ((figure.percent_x, axes.xaxis), (figure.percent_y, axes.yaxis)):
            if asked:
                axis.set_major_formatter(PercentFormatter(1.0))
        axes.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
        axes.grid(alpha=0.3)
        if crowded:
            canvas.legend(loc="outside right upper", fontsize="small")
        else:
            axes.legend(fontsize="small")
        canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _has_errors(series: Series) -> bool:
    return any(point.error is not None for point in series.points)
