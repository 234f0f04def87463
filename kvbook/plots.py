"""How figures and tables look, in one place.

Knows: matplotlib, how a roofline is drawn, Markdown tables. Does not know: models, measurements.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import matplotlib as mpl
from cycler import cycler
from IPython.display import Markdown, display
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib_inline.backend_inline import set_matplotlib_formats

# Okabe and Ito's palette: eight colors that color-blind readers can tell apart.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, INK = "#CC79A7", "#56B4E9", "#F0E442", "#1A1A1A"
READABLE = 4.5  # contrast of text and its ground, WCAG 2.1, 1.4.3
LARGEST = 1e12  # operations per byte, on an axis
CYCLE = [BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY]


def style() -> None:
    """Set the book's figure style for this notebook.

    Figures come out as SVG and PNG. The SVG is the same to the letter on every run (fixed hash
    salt, no date), so a test can compare it; the PNG is for viewers that do not show SVG.
    """
    set_matplotlib_formats("svg", "png", metadata={"Date": None})
    mpl.rcParams.update(
        {
            "svg.hashsalt": "kvbook",
            "figure.figsize": (6.4, 3.4),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "axes.prop_cycle": cycler(color=CYCLE),
            "axes.grid": False,
            "font.size": 10,
            "lines.linewidth": 2,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
        }
    )


def text_color(color: str) -> str:
    """The color for words: the same hue, darker where it would be too pale on white to read.

    Lines may be pale, letters not: the result has a contrast of at least 4.5:1 to white. (Dark
    mode turns a figure around, which leaves dark colors more contrast still.)
    """
    try:
        red, green, blue = to_rgb(color)
    except (TypeError, ValueError):
        raise ValueError(f"color must be one such as plots.BLUE, got {color!r:.80}") from None
    while _luminance(red, green, blue) > 1.05 / READABLE - 0.05:  # white has a luminance of 1
        red, green, blue = 0.95 * red, 0.95 * green, 0.95 * blue
    return to_hex((red, green, blue))


def label_end(ax: Axes, x: float, y: float, text: str, color: str) -> None:
    """Name a curve at its right end, in its own hue, instead of in a legend."""
    _check_axes(ax)
    if not isinstance(text, str):
        raise ValueError(f"text must be the name of the curve, got {text!r:.80}")
    shade = text_color(color)
    ax.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", color=shade, va="center")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Show a table that every viewer sets as one. Numbers stand right, words left.

    ``head`` names the columns, with units: "cache (KiB)". A cell is shown as ``str`` makes it, so
    round and group numbers before. ``ValueError`` for a row of another length than ``head``.
    """
    lines = [[str(part) for part in row] for row in rows]
    for line in lines:
        if len(line) != len(head):
            raise ValueError(f"row {line} has {len(line)} parts; the head has {len(head)}: {head}")
    numeric = [all(line[i][:1].isdigit() for line in lines) for i in range(len(head))]
    rule = ["---:" if right else "---" for right in numeric]
    written = "\n".join(f"| {' | '.join(line)} |" for line in [list(head), rule, *lines])
    display(Markdown(written))


class Machine(Protocol):
    """What a roofline needs of a machine; ``kvbook.accounting.Hardware`` has it."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""

    def peak(self, dtype: str) -> float:
        """Operations per second; ``ValueError`` for a dtype without one."""

    def ridge(self, dtype: str) -> float:
        """Operations per byte at which the slope meets the peak."""


def roofline(
    ax: Axes, machine: Machine, colors: Mapping[str, str], low: float = 0.1, high: float = 10_000.0
) -> None:
    """Draw the bounds of a machine, from ``low`` to ``high`` operations per byte.

    One slope for the memory and one flat roof for each dtype in ``colors``, each with its rate
    beside it. Points are the caller's: operations per byte, operations per second. (Williams,
    Waterman and Patterson, 2009.)
    """
    _check_axes(ax)
    if not isinstance(colors, Mapping) or not colors:
        raise ValueError(
            "colors must name at least one dtype, as in {'float32': plots.BLUE}, got "
            f"{colors!r:.80}"
        )
    if not all(hasattr(machine, name) for name in ("bandwidth", "peak", "ridge")):
        raise ValueError(f"machine must be a Hardware or its like, got {machine!r:.80}")
    for name, bound in (("low", low), ("high", high)):
        if type(bound) not in (int, float) or not 0 < bound < LARGEST:
            raise ValueError(f"{name} must be above 0 and below {LARGEST:g}, got {bound!r:.80}")
    if not low < high:
        raise ValueError(f"low must be below high, got low {low!r} and high {high!r}")
    for dtype in colors:
        machine.peak(dtype)  # says so if there is none, before anything is drawn
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        xlabel="operations per byte (FLOPs/B)",
        ylabel="operations per second (FLOP/s)",
    )
    roofs = {dtype: (machine.ridge(dtype), machine.peak(dtype)) for dtype in colors}
    for dtype, (ridge, peak) in roofs.items():
        ax.plot([ridge, high], [peak, peak], color=colors[dtype], linewidth=1.2)
        label_end(ax, high, peak, f"{dtype}, {_rate(peak, 'FLOP/s')}", colors[dtype])
    top = max(ridge for ridge, _ in roofs.values())
    ends = [low, top]
    ax.plot(ends, [end * machine.bandwidth for end in ends], color=INK, linewidth=1.2)
    # Left of the slope nothing can stand but its name.
    ax.annotate(
        f"memory\n{_rate(machine.bandwidth, 'B/s')}", (top / 3, top / 3 * machine.bandwidth),
        (-8, 0), textcoords="offset points", color=INK, ha="right", va="bottom",
    )  # fmt: skip


def _luminance(red: float, green: float, blue: float) -> float:
    """Relative luminance of an sRGB color, as WCAG 2.1 defines it."""
    r, g, b = (
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _check_axes(ax: Axes) -> None:
    if not isinstance(ax, Axes):
        raise ValueError(f"ax must be Axes, as plt.subplots() makes them, got {ax!r:.80}")


def _rate(amount: float, unit: str) -> str:
    """Whole thousands of a unit: 52.8e9 B/s are ``53 GB/s``, 4.8e12 are ``4,800 GB/s``."""
    return f"{amount / 1e9:,.0f} G{unit}"
