"""Tables for a terminal and for Markdown.

Knows: widths of columns. Does not know: what stands in them.
"""


class Table:
    """Rows of strings under a heading."""

    def __init__(self, *heading: str) -> None:
        self.rows = [heading]

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def plain(self, left: int = 1) -> str:
        """Aligned columns, the first ``left`` ones to the left and the others to the right."""
        widths = [max(len(row[i]) for row in self.rows) for i in range(len(self.rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in self.rows
        )

    def markdown(self) -> str:
        """A pipe table; numbers are aligned to the right by the colons of its second line."""
        heading, *rows = self.rows
        marks = ["---", *["---:"] * (len(heading) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in (heading, marks, *rows))
