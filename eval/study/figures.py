"""The study's figures, as `eval.report` draws them: every point names the line it came from."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from eval.report import Figure, Point, Series
from eval.study.findings import Result, Results, Value
from eval.study.plan import Method, Recipe, Row


def figures(results: Results) -> list[Figure]:
    """Every figure that the results are enough for."""
    found = [
        _curve(results, "loss", "WikiText-2: loss and sparsity", "nats a token (lower is better)",
               lambda result: result.loss),
        _curve(results, "tasks", "Seven tasks: accuracy and sparsity", "mean accuracy, 7 tasks",
               lambda result: result.mean()),
        _groups(results),
        _layers(results, "allocation", "What each layer skips", "groups skipped", _allocation),
        _layers(results, "errors", "Error of the residual stream", "relative L2 error to dense",
                _stream),
    ]  # fmt: skip
    return [figure for figure in found if figure.series]


def _curve(
    results: Results, key: str, title: str, label: str, value: Callable[[Result], Value | None]
) -> Figure:
    lines: dict[str, list[Point]] = {}
    for result in results.values():
        row, found = result.row, value(result)
        if found is None or result.accounting is None or not ordinary(row):
            continue
        part = "perplexity"
        point = Point(result.accounting["flops"], found.value, result.source(part), found.stderr)
        lines.setdefault(_name(row), []).append(point)
    series = tuple(Series(n, tuple(sorted(p, key=lambda q: q.x))) for n, p in lines.items())
    x_label = "FLOPs skipped, of the routable ones"
    return Figure(key, title, x_label, label, series, percent_x=True)


def _groups(results: Results) -> Figure:
    lines: dict[str, list[Point]] = {}
    for result in results.values():
        row, loss = result.row, result.loss
        plain = dataclasses.replace(row, ffn_group=Recipe().group)
        if row.method != "wide" or loss is None or not ordinary(plain) or row.target != 0.5:
            continue
        assert row.ffn_group is not None
        point = Point(row.ffn_group, loss.value, result.source("perplexity"), loss.stderr)
        lines.setdefault(_name(row), []).append(point)
    series = [Series(n, tuple(sorted(p, key=lambda q: q.x))) for n, p in lines.items()]
    series = [one for one in series if len(one.points) > 1]
    label = "nats a token (lower is better)"
    title = "FFN group size, 50 %"
    return Figure("groups", title, "FFN channels a group", label, tuple(series), log_x=True)


def _layers(
    results: Results,
    key: str,
    title: str,
    label: str,
    values: Callable[[Result], Mapping[str, tuple[Sequence[float], str]]],
) -> Figure:
    series = []
    for result in results.values():
        if result.row.target != 0.5 or not ordinary(result.row):
            continue
        for name, (numbers, source) in values(result).items():
            points = tuple(Point(layer, y, source) for layer, y in enumerate(numbers))
            series.append(Series(f"{_name(result.row)}{name}", points))
    return Figure(key, title, "layer", label, tuple(series))


def _allocation(result: Result) -> Mapping[str, tuple[Sequence[float], str]]:
    found = result.part("perplexity")
    if found is None or result.row.method != "wide":
        return {}
    source = result.source("perplexity")
    return {f": {module}": (rates, source) for module, rates in found["layers"].items()}


def _stream(result: Result) -> Mapping[str, tuple[Sequence[float], str]]:
    found = result.part("errors")
    return {} if found is None else {"": (found["errors"]["stream"], result.source("errors"))}


def ordinary(row: Row) -> bool:
    """Whether nothing but method, stage, target and length sets the row apart."""
    recipe = Recipe()
    sizes = row.ffn_group in (None, recipe.group) and row.attn_group in (None, recipe.heads)
    return sizes and row.budget in (None, "separate") and row.distill == "off" and not row.seed


def alike(row: Row, results: Results, methods: Sequence[Method]) -> list[Result]:
    """The ordinary rows of these methods that have the row's target, stage and length."""
    same = (row.target, row.stage, row.updates)
    return [
        other
        for other in results.values()
        if other.row.method in methods
        and ordinary(other.row)
        and (other.row.target, other.row.stage, other.row.updates) == same
    ]


def _name(row: Row) -> str:
    if not row.stage:
        return row.method
    length = "" if row.updates == Recipe().updates else f", {row.updates} updates"
    return f"{row.method}, stage {row.stage}{length}"
