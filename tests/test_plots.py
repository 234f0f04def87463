"""Words in a figure can be read: 4.5:1 on white, and where dark mode turns the figure around."""

import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb

from kvbook import plots
from tools import notebooks

PALETTE = ["BLUE", "ORANGE", "GREEN", "VERMILION", "PURPLE", "SKY", "YELLOW", "INK"]
WHITE = (1.0, 1.0, 1.0)


def luminance(color):
    """WCAG 2.1, relative luminance of sRGB channels from 0 to 1."""
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def turned(color):
    """A color after book.css: invert(0.93), hue-rotate(180deg), as CSS Filter Effects has them."""
    r, g, b = (c * (1 - 2 * 0.93) + 0.93 for c in color)
    rows = [(-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856)]
    return tuple(min(1.0, max(0.0, x * r + y * g + z * b)) for x, y, z in rows)


def test_the_filter_of_this_test_is_the_book_s():
    css = (notebooks.ROOT / "book" / "_static" / "book.css").read_text()
    assert re.findall(r"filter: (.*);", css) == ["invert(0.93) hue-rotate(180deg)"]


def test_the_oracle_knows_the_pairs_that_everybody_knows():
    assert contrast(WHITE, (0, 0, 0)) == pytest.approx(21)
    assert contrast(WHITE, to_rgb("#767676")) == pytest.approx(4.54, abs=0.01)
    assert turned(WHITE) == pytest.approx((0.07, 0.07, 0.07))


@pytest.mark.parametrize("name", PALETTE)
def test_a_curve_s_name_can_be_read_in_light_and_dark(name):
    figure, ax = plt.subplots()
    plots.label_end(ax, 0, 0, "a curve", getattr(plots, name))
    shown = to_rgb(ax.texts[0].get_color())
    plt.close(figure)
    assert contrast(shown, WHITE) >= 4.5
    assert contrast(turned(shown), turned(WHITE)) >= 4.5


def test_the_pale_colors_alone_change():
    assert contrast(to_rgb(plots.ORANGE), WHITE) < 2.3  # what this is for
    colors = {name: getattr(plots, name) for name in PALETTE}
    same = [name for name, color in colors.items() if plots.text_color(color) == color.lower()]
    assert same == ["BLUE", "INK"]


@pytest.mark.parametrize("color", ["C0", "tab:orange", (0.9, 0.9, 0.2), "yellow"])
def test_any_color_of_matplotlib_becomes_readable(color):
    assert contrast(to_rgb(plots.text_color(color)), WHITE) >= 4.5


@pytest.mark.parametrize("color", ["no color", None, 3, ""])
def test_what_is_no_color_is_refused_with_what_was_given(color):
    figure, ax = plt.subplots()
    with pytest.raises(ValueError, match=re.escape(f"got {color!r}")):
        plots.label_end(ax, 0, 0, "a curve", color)
    assert not ax.texts
    plt.close(figure)
