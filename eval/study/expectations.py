"""What the paper leads one to expect of these rows, beside what they say."""

from collections.abc import Iterator, Sequence

from eval.study.figures import alike, ordinary
from eval.study.findings import Result, Results, difference
from eval.study.plan import Recipe

Line = tuple[str, str, str]  # expected; of which rows; what they say


def expectations(results: Results) -> list[Line]:
    """The paper's four claims, each with the figures of the rows that there are."""
    return [*_depth(results), *_groups(results), *_allocation(results), *_accumulation(results)]


def _depth(results: Results) -> Iterator[Line]:
    for wide, depth in _pairs(results):
        found = difference(wide, depth)
        if found is None or wide.accounting is None or depth.accounting is None:
            continue
        own, theirs = (100 * skipped["flops"] for skipped in (wide.accounting, depth.accounting))
        yield (
            "lower loss than depth routing at as many FLOPs skipped",
            _where(wide),
            f"{found.value:+.2f} nats ({found.low:+.2f} to {found.high:+.2f}) at {own:.1f} % and "
            f"{theirs:.1f} %",
        )


def _groups(results: Results) -> Iterator[Line]:
    expected = {1: "finer groups are better", 2: "group sizes are nearly equal"}
    sizes = sorted({Recipe().group, *Recipe().groups})
    runs: dict[tuple[int, int], dict[int | None, float]] = {}  # by stage and length, then size
    for result in _wide(results, target=0.5, attn_group=Recipe().heads, budget="separate"):
        if result.perplexity is not None:
            run = runs.setdefault((result.row.stage, result.row.updates or 0), {})
            run[result.row.ffn_group] = result.perplexity.value
    for (stage, length), found in sorted(runs.items()):
        if found.keys() != set(sizes):
            continue
        listed = ", ".join(f"{found[size]:.1f}" for size in sizes)
        spread = max(found.values()) / min(found.values())
        yield (
            expected[stage],
            f"50 %, stage {stage}, {length} updates, groups of {', '.join(map(str, sizes))}",
            f"perplexity {listed}: the worst is {spread:.2f} times the best",
        )


def _allocation(results: Results) -> Iterator[Line]:
    for result in _wide(results, target=0.5):
        if result.row.budget in ("paper", "flops") and result.accounting is not None:
            attention, ffn = (100 * result.accounting[m] for m in ("attention", "ffn"))
            yield (
                "a budget for both modules skips more of attention",
                f"{_where(result)}, budget `{result.row.budget}`",
                f"{attention:.1f} % of attention, {ffn:.1f} % of the FFN",
            )


def _accumulation(results: Results) -> Iterator[Line]:
    for wide, depth in _pairs(results):
        ends = [found["value"] for one in (wide, depth) if (found := one.part("errors"))]
        if len(ends) == 2:
            yield (
                "less error accumulates than with depth routing",
                _where(wide),
                f"the stream's error at the end is {ends[0]:.2f}, of depth routing {ends[1]:.2f}",
            )


def _pairs(results: Results) -> Iterator[tuple[Result, Result]]:
    """Ordinary WIDE rows, each with depth routing of the same target, stage and length."""
    for wide in _wide(results):
        if ordinary(wide.row):
            yield from ((wide, depth) for depth in alike(wide.row, results, ("depth",)))


def _wide(results: Results, **fields: object) -> Sequence[Result]:
    """WIDE rows of seed 0 without distillation, and of these values."""
    return [
        result
        for result in results.values()
        if result.row.method == "wide"
        and not result.row.seed
        and result.row.distill == "off"
        and all(getattr(result.row, name) == value for name, value in fields.items())
    ]


def _where(result: Result) -> str:
    row = result.row
    assert row.target is not None
    return f"{100 * row.target:g} %, stage {row.stage}, {row.updates} updates"
