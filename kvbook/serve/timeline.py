"""A picture of who ran when.

Knows: matplotlib, records. Does not know: engines, models.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes

from kvbook.cache.sizes import check_class
from kvbook.serve.records import RequestRecord, StepRecord

# Colors of the style that is in force: those of kvbook.plots can be told apart by everybody.
PHASES = {"prefill": ("C3", "reads its prompt"), "decode": ("C0", "decodes"),
          "recompute": ("C1", "computes again")}


def timeline(
    ax: Axes,
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    unit: str = "s",
) -> None:
    """One line for each request: when it waited, read its prompt, decoded, computed again.

    Requests stand in the order of their ids, the first on top. A thin line is time in which the
    request was there and did not run; a short bar across marks where it ended. ``requests`` and
    ``steps`` are the records of an ``Engine`` or of ``serve_static``.
    """
    check_class("ax", ax, Axes, "plt.subplots() makes them")
    for name, given, kind in (("requests", requests, RequestRecord), ("steps", steps, StepRecord)):
        for record in given:
            check_class(f"one of {name}", record, kind, "an Engine keeps them")
    ids = sorted(record.id for record in requests)
    place = {id: number for number, id in enumerate(ids)}
    for record in requests:
        y = place[record.id]
        ax.plot([record.arrival, record.ended], [y, y], color="0.6", linewidth=0.8, zorder=1)
        ax.plot([record.ended] * 2, [y - 0.4, y + 0.4], color="0.2", linewidth=1, zorder=3)
    for phase, (color, label) in PHASES.items():
        bars = runs_of(phase, steps)
        for id, spans in bars.items():
            if id in place:
                ax.broken_barh(spans, (place[id] - 0.4, 0.8), color=color, linewidth=0, zorder=2)
        if bars:
            ax.broken_barh([], (0, 0), color=color, label=label)
    ax.set(xlabel=f"time ({unit})", ylabel="request", yticks=range(len(ids)), yticklabels=ids)
    ax.set_ylim(len(ids) - 0.4, -0.6)
    ax.legend(loc="lower left")


def runs_of(phase: str, steps: Sequence[StepRecord]) -> dict[int, list[tuple[float, float]]]:
    """For each request the spans (start, width) in which it was in this phase without a break."""
    found: dict[int, list[tuple[float, float]]] = {}
    last: dict[int, int] = {}  # the step in which it was seen last
    for step in steps:
        for one in step.ran:
            if one.phase != phase:
                continue
            spans = found.setdefault(one.id, [])
            if spans and last[one.id] == step.number - 1 and sum(spans[-1]) >= step.start - 1e-9:
                spans[-1] = (spans[-1][0], step.end - spans[-1][0])
            else:
                spans.append((step.start, step.end - step.start))
            last[one.id] = step.number
    return found
