"""Render a planned step as one HTML page of inline SVG and tables, without scripts or external resources."""

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from composer_fsdp2.config.text import human_bytes
from composer_fsdp2.estimate.plan_text import (
    Table,
    bounds_table,
    collectives_table,
    human_count,
    human_seconds,
    memory_table,
    plan_text,
    shown_findings,
    units_table,
    where,
)
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.step import Kind, MemorySample, Phase

_COLUMNS = 480  # of the timeline; more samples are downsampled to these, by maximum
_WIDTH, _HEIGHT = 960.0, 300.0
_LEFT, _TOP, _BOTTOM = 74.0, 16.0, 34.0

# (light scheme, dark scheme). One lightness per group (state, gathered, activations): distinct for red-green blindness.
_COLOURS = {
    Kind.PARAMETERS: ("#3b5b92", "#6f9be0"),
    Kind.OPTIMIZER: ("#7aa0d4", "#3f62a0"),
    Kind.BUFFERS: ("#5d6b80", "#8c99ad"),
    Kind.GRADIENTS: ("#1f8a84", "#38b5ad"),
    Kind.GATHERED: ("#d98a1f", "#e8a64a"),
    Kind.UNSHARDED_GRADIENTS: ("#f0c36a", "#b98a2c"),
    Kind.COMMUNICATION: ("#a65a2a", "#cf8352"),
    Kind.ACTIVATIONS: ("#9a6bb0", "#b58acb"),
    Kind.LOSS: ("#c2477f", "#e06fa2"),
}
_GREY = ("#888888", "#888888")


def plan_page(step: PlannedStep, suggestions: str = "", made_by: str = "") -> str:
    """Return the HTML of the page for a planned step.

    Args:
        suggestions: The text output of ``--suggest``; "" without it.
        made_by: The command line, the version and the date; "" omits them.
    """
    proposed = [f"<h2>Suggestions</h2>\n<pre>{escape(suggestions)}</pre>"] if suggestions else []
    made = [f'<p class="soft">{escape(made_by)}</p>'] if made_by else []
    body = "\n".join((*_head(step), *made, *_verdict(step), *_timeline(step), *proposed, *_tables(step)))
    title = escape(f"plan of {step.source}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<link rel="icon" href="data:,"/>\n'
        f"<title>{title}</title>\n<style>{_style()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _style() -> str:
    light, dark = (
        "".join(f"--k{place}:{_COLOURS.get(kind, _GREY)[scheme]};" for place, kind in enumerate(Kind))
        for scheme in (0, 1)
    )
    fills = "".join(f".k{place}{{fill:var(--k{place});background:var(--k{place})}}" for place, _ in enumerate(Kind))
    return (
        f":root{{color-scheme:light dark;--ink:#1d2330;--soft:#5b6475;--line:#d9dde5;--paper:#fff;--panel:#f6f7fa;"
        f"--good:#16794b;--bad:#b3261e;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{--ink:#e6e9f0;--soft:#9aa3b5;--line:#343b4a;--paper:#14171f;"
        f"--panel:#1c212c;--good:#57c792;--bad:#ff8a80;{dark}}}}}"
        f"{_RULES}{fills}"
    )


_RULES = (
    "*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    "main{max-width:1020px;margin:0 auto;padding:24px 16px 64px}h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}"
    "h2{font-size:1.1rem;margin:36px 0 8px}p{margin:6px 0}.soft,figcaption{color:var(--soft)}"
    "figure{margin:0}svg{display:block;width:100%;height:auto}.scroll{overflow-x:auto}.scroll svg{min-width:640px}"
    "figcaption{margin:4px 0 10px}text{fill:var(--soft);font-size:13px}.axis{stroke:var(--line);stroke-width:1}"
    ".limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}.limit-text{fill:var(--bad)}"
    ".limit-text,.peak-text{paint-order:stroke;stroke:var(--paper);stroke-width:4px}"
    ".peak{stroke:var(--ink);stroke-width:1}.peak-text{fill:var(--ink);font-weight:600}"
    "td i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:8px}"
    ".cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0 0}"
    ".card{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 12px}"
    ".card b{display:block;font-size:1.15rem}.good{color:var(--good)}.bad{color:var(--bad)}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}"
    "th,td{padding:5px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}"
    "th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:break-word;min-width:10em}"
    "ul{padding-left:20px;margin:6px 0}li{overflow-wrap:anywhere}"
    "pre{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px;overflow-x:auto;"
    "font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    "@media(max-width:760px){th,td{padding:5px 6px}th:first-child,td:first-child{overflow-wrap:anywhere}}"
    "summary{cursor:pointer;color:var(--soft);margin-top:36px}"
)


def _head(step: PlannedStep) -> Iterator[str]:
    ranks = f"{step.world_size} ranks, {step.gpus_per_node} a node; {step.plan.mesh}"
    number = f"{step.num_microbatches} {'microbatches' if step.num_microbatches > 1 else 'microbatch'}"
    size = f"{step.microbatch_size} {'rows' if step.microbatch_size > 1 else 'row'} of {step.sequence_length} tokens"
    yield f"<h1>{escape(step.source)}</h1>"
    yield (
        f'<p class="soft">{human_count(step.num_parameters)} parameters in {len(step.plan.units)} units · '
        f"{escape(ranks)} · {escape(step.precision)} · {escape(step.optimizer)} · on each rank "
        f"{number} of {size} a step</p>"
    )


def _verdict(step: PlannedStep) -> Iterator[str]:
    peak, memory = step.estimate.peak_bytes, step.memory
    cards = [("peak of a rank", human_bytes(peak), "")]
    if memory is not None:
        left = memory.usable_bytes - peak
        verdict = ("fits", "to spare", "good") if left >= 0 else ("does not fit", "too much", "bad")
        cards.append((verdict[0], f"{human_bytes(abs(left))} {verdict[1]}", verdict[2]))
        cards.append((f"usable of {human_bytes(memory.given_bytes)}", human_bytes(memory.usable_bytes), ""))
    sent = sum(each.ring_bytes for each in step.traffic)
    crossing = sum(each.node_bytes for each in step.traffic)
    cards.append(("sent by a rank in a step", human_bytes(sent), ""))
    cards.append(("of it to other nodes", human_bytes(crossing), ""))
    if step.bounds is not None:
        cards.append(("a step takes at least", human_seconds(step.bounds.lower_s), ""))
    if step.blocking:
        cards.append(("findings to decide", str(len(step.blocking)), "bad"))
    yield '<div class="cards">'
    for name, value, how in cards:
        yield f'<div class="card"><span class="soft">{escape(name)}</span><b class="{how}">{escape(value)}</b></div>'
    yield "</div>"
    if memory is not None:
        reserve = (
            f"A reserve of {memory.reserve} is left for what is not modelled: fragmentation, NCCL, CUDA's context."
        )
        yield f'<p class="soft">{escape(reserve)}</p>'


# ---------------------------------------------------------------------------------------------------------------------
# The timeline


def drawn_samples(timeline: Sequence[MemorySample], columns: int = _COLUMNS) -> list[MemorySample]:
    """Downsample to at most ``columns`` samples.

    The largest sample of each interval is kept, so the peak is preserved.
    """
    if len(timeline) <= columns:
        return list(timeline)
    edges = [number * len(timeline) // columns for number in range(columns + 1)]
    return [max(timeline[start:end], key=lambda sample: sample.total_bytes) for start, end in itertools.pairwise(edges)]


def _timeline(step: PlannedStep) -> Iterator[str]:
    samples, peak = drawn_samples(step.estimate.timeline), step.estimate.peak
    usable = step.memory.usable_bytes if step.memory else 0
    limit = usable if usable < 3 * peak.total_bytes else 0  # a limit far above would flatten the chart
    scale = _Scale(1.08 * max(peak.total_bytes, limit), len(samples))
    yield "<h2>Memory of a rank over a step</h2>"
    yield '<figure><div class="scroll">'
    yield f'<svg viewBox="0 {-_TOP:g} {_WIDTH:g} {_HEIGHT + _TOP:g}" role="img" aria-label="memory over a step">'
    yield from _axis(scale)
    yield from _layers(samples, scale)
    yield from _phases(samples, scale)
    if limit:
        y = scale.y(limit)
        yield f'<line class="limit" x1="{_LEFT:g}" x2="{_WIDTH:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="limit-text" x="{_LEFT + 6:g}" y="{y - 5:.1f}">usable: {human_bytes(limit)}</text>'
    yield from _peak_mark(peak, samples, scale)
    assumed = " Activations are not counted." if step.trace is None else ""
    yield (
        f"</svg></div><figcaption>Largest in {escape(where(peak))}. From left to right: the order of events, not time; "
        f"a line begins each microbatch.{assumed}</figcaption></figure>"
    )
    colours = [f'<i class="k{place}"></i>' for place, kind in enumerate(Kind) if step.most_of(kind)]
    yield from _table(memory_table(step), colours)


class _Scale:
    """Maps sample indices and bytes to SVG coordinates."""

    def __init__(self, most_bytes: float, samples: int) -> None:
        self.most_bytes, self.samples = most_bytes or 1.0, max(1, samples)

    def x(self, number: int) -> float:
        return _LEFT + (_WIDTH - _LEFT) * number / self.samples

    def y(self, num_bytes: float) -> float:
        return (_HEIGHT - _BOTTOM) * (1 - num_bytes / self.most_bytes)


def _axis(scale: _Scale) -> Iterator[str]:
    """Yield grid lines at multiples of a power of two, the smallest that results in at most six steps."""
    step = 1
    while scale.most_bytes / step > 6:
        step *= 2
    for num_bytes in range(0, int(scale.most_bytes) + 1, step):
        y, label = scale.y(num_bytes), human_bytes(num_bytes).replace(".0 ", " ") if num_bytes else "0"
        yield f'<line class="axis" x1="{_LEFT:g}" x2="{_WIDTH:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def _layers(samples: Sequence[MemorySample], scale: _Scale) -> Iterator[str]:
    """Stacked step areas, one per kind."""
    below = [0] * len(samples)
    for place, kind in enumerate(Kind):
        above = [low + sample.bytes_of(kind) for low, sample in zip(below, samples, strict=True)]
        if above != below:
            upper = [point for number, value in enumerate(above) for point in _stair(number, value, scale)]
            lower = [point for number, value in enumerate(below) for point in _stair(number, value, scale)]
            outline = f"M{'L'.join(upper)}L{'L'.join(reversed(lower))}Z"
            yield f'<path class="k{place}" d="{outline}"><title>{kind.value}</title></path>'
        below = above


def _stair(number: int, value: float, scale: _Scale) -> tuple[str, str]:
    y = scale.y(value)
    return f"{scale.x(number):.1f},{y:.1f}", f"{scale.x(number + 1):.1f},{y:.1f}"


def _phases(samples: Sequence[MemorySample], scale: _Scale) -> Iterator[str]:
    """Mark the start of each microbatch, and label its phases. If the labels do not fit, label the microbatch."""
    starts = [
        number
        for number, sample in enumerate(samples)
        if not number
        or (sample.microbatch, sample.phase) != (samples[number - 1].microbatch, samples[number - 1].phase)
    ]
    y = _HEIGHT - _BOTTOM
    for number, end in zip(starts, [*starts[1:], len(samples)], strict=True):
        sample, x = samples[number], scale.x(number)
        if sample.phase is Phase.FORWARD and number:
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y + 8:g}"/>'
        word = sample.phase.value
        if scale.x(end) - x > 7 * len(word):
            yield f'<text x="{(x + scale.x(end)) / 2:.1f}" y="{y + 18:g}" text-anchor="middle">{word}</text>'
        elif sample.phase is Phase.FORWARD and scale.x(end) - x > 7:
            yield f'<text x="{x + 3:.1f}" y="{y + 18:g}">{sample.microbatch + 1}</text>'


def _peak_mark(peak: MemorySample, samples: Sequence[MemorySample], scale: _Scale) -> Iterator[str]:
    number = next(number for number, sample in enumerate(samples) if sample.total_bytes == peak.total_bytes)
    x, y = (scale.x(number) + scale.x(number + 1)) / 2, scale.y(peak.total_bytes)
    is_left = x < _WIDTH / 2
    yield f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 12:.1f}" y2="{y:.1f}"/>'
    yield (
        f'<text class="peak-text" x="{x + (5 if is_left else -5):.1f}" y="{y - 3:.1f}" '
        f'text-anchor="{"start" if is_left else "end"}">{human_bytes(peak.total_bytes)}</text>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# The sections that ``plan_text`` has too


def _tables(step: PlannedStep) -> Iterator[str]:
    yield "<h2>Units</h2>"
    yield from _table(units_table(step))
    yield "<h2>Collectives of a step, for one rank</h2>"
    yield from _table(collectives_table(step))
    yield (
        '<p class="soft">In a ring a rank sends (n-1)/n of a full buffer, and of an all-reduce twice that. A ring over '
        "several nodes leaves each once: the last column is a rank’s share of it.</p>"
    )
    if step.bounds is not None:
        yield "<h2>Bounds of a step</h2>"
        yield from _table(bounds_table(step))
        yield _list('<p class="soft">Speeds:</p>', step.bounds.machine.sources)
        yield _list('<p class="soft">Not known, and not in these numbers:</p>', step.bounds.unknown)
    yield _list("<h2>Findings</h2>", [*map(str, shown_findings(step)), *step.estimate.notes])
    yield f"<details><summary>As text</summary><pre>{escape(plan_text(step))}</pre></details>"


def _table(table: Table, marks: Sequence[str] = ()) -> Iterator[str]:
    """Render a table. ``marks`` has the HTML to insert before the first cell of each row."""
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    yield "</tr></thead><tbody>"
    for mark, row in zip(marks or [""] * len(table.rows), table.rows, strict=True):
        first, *others = map(escape, row)
        yield f"<tr><td>{mark}{first}</td>" + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>"
    yield "</tbody></table></div>"


def _list(title: str, texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"{title}<ul>{items}</ul>" if texts else ""
