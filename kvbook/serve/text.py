"""Tokens to text, as they come.

Knows: that a letter may need several tokens. Does not know: who reads the text.
"""

from collections.abc import Callable, Sequence

NO_LETTER = "\ufffd"  # what a decoder writes for bytes that are no letter, or none yet


class TextStream:
    """The text of tokens that come one after the other; what may still change is held back.

    >>> parts = {(7,): "a", (7, 8): "a\\ufffd", (7, 8, 9): "aé"}
    >>> stream = TextStream(lambda tokens: parts[tuple(tokens)])
    >>> [stream.add([7]), stream.add([8]), stream.add([9]), stream.end()]
    ['a', '', 'é', '']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._given = 0  # letters handed out

    def add(self, tokens: Sequence[int]) -> str:
        """What is certain of the text, and was not handed out yet."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        return self._hand_out(text[: len(text.rstrip(NO_LETTER))])

    def end(self) -> str:
        """The rest: no more tokens come."""
        return self._hand_out(self._decode(self._tokens)) if self._tokens else ""

    def _hand_out(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new
