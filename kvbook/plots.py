"""How figures look, in one place.

Knows: matplotlib. Does not know: what is drawn.
"""

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib_inline.backend_inline import set_matplotlib_formats

# Okabe and Ito's palette: eight colors that color-blind readers can tell apart.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, INK = "#CC79A7", "#56B4E9", "#F0E442", "#1A1A1A"
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


def label_end(ax: Axes, x: float, y: float, text: str, color: str) -> None:
    """Name a curve at its right end, in its own color, instead of in a legend."""
    ax.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", color=color, va="center")
