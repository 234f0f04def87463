"""One English text to measure models on.

Knows: the text, written for this book. Does not know: tokens, models.

It is a story of 2,039 words, about 2,500 tokens of SmolLM2. Names and facts from its beginning
return at its end, so a model that forgets the beginning has something to lose.
"""

from pathlib import Path

FILE = Path(__file__).with_name("sample.txt")


def sample_text() -> str:
    """The story, paragraphs parted by blank lines, without a newline at the end."""
    return FILE.read_text(encoding="utf-8").rstrip("\n")
