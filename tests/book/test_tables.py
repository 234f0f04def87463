"""Tables of a chapter are Markdown, so that every viewer sets them as tables."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from kvbook import plots


def shown(head: list[str], rows: list[list[object]]) -> str:
    InteractiveShell.instance()
    with capture_output() as captured:
        plots.table(head, rows)
    return str(captured.outputs[0].data["text/markdown"])


def test_numbers_stand_right_and_words_left() -> None:
    assert shown(["part", "size (KiB)"], [["keys", "1,024"], ["values", 8]]) == (
        "| part | size (KiB) |\n| --- | ---: |\n| keys | 1,024 |\n| values | 8 |"
    )


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row \['keys'\] has 1 parts; the head has 2"):
        plots.table(["part", "size"], [["keys"]])
