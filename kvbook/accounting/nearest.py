"""The known name that is nearest to one that is not known.

Knows: names. Does not know: what they name.
"""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 100  # characters of a name that are compared


def hint(wanted: str, known: Iterable[str], otherwise: str) -> str:
    """``did you mean …?`` with at most three near names in any case, or else ``otherwise``.

    >>> hint("lama-3-8b", ["gpt2", "llama-3-8b"], "see all names")
    'did you mean llama-3-8b?'
    """
    spelled = {name.lower(): name for name in known}
    close = get_close_matches(wanted.strip().lower()[:LONGEST], spelled, n=3, cutoff=0.5)
    near = [spelled[name] for name in close]
    return f"did you mean {', '.join(near)}?" if near else otherwise
