"""What a user may hand in by mistake, and what counts as a fault then.

A call with one wrong argument either works as documented or raises ``ValueError`` or ``TypeError``
with a message that quotes the value, before any state has changed.
"""

import inspect
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

SECONDS = 3  # for one call; longer ones count as endless


class Count(int):
    """A subclass of int, as enums and some libraries have them."""


class Word(str):
    """A subclass of str."""


class Picture(Tensor):
    """A subclass of Tensor."""


def wrong_values() -> dict[str, Any]:
    """Fresh each time: a call may change what it was given."""
    plain = torch.arange(6).reshape(2, 3)
    return {
        "None": None,
        "True": True,
        "negative": -1,
        "zero": 0,
        "huge": 10**30,
        "64 bits": 2**63,
        "half": 1.5,
        "NaN": float("nan"),
        "infinity": float("inf"),
        "text": "text",
        "empty text": "",
        "bytes": b"bytes",
        "empty list": [],
        "list": [1, 2],
        "mixed list": [1, "2", None],
        "nested list": [[1, 2], [3]],
        "dict": {"a": 1},
        "set": {1, 2},
        "object": object(),
        "function": lambda *_: None,
        "int subclass": Count(2),
        "str subclass": Word("text"),
        "numpy int": np.int64(2),
        "numpy float": np.float32(0.5),
        "numpy array": np.arange(3),
        "wrong dtype": plain.float(),
        "wrong rank": plain[None, None],
        "scalar tensor": torch.tensor(2),
        "empty tensor": torch.empty(0, dtype=torch.int64),
        "meta tensor": plain.to("meta"),
        "strided tensor": torch.arange(12).reshape(3, 4).t(),
        "expanded tensor": torch.tensor([[1], [2]]).expand(2, 3),
        "gradients": torch.ones(2, 3, requires_grad=True),
        "NaN tensor": torch.full((2, 3), float("nan")),
        "tensor subclass": plain.as_subclass(Picture),
        "dtype": torch.int8,
        "device": torch.device("meta"),
    }


@dataclass
class Good:
    """A call that works: the function, its arguments by name, and what must not change."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    state: Callable[[], Any] = lambda: None
    positional: tuple[str, ...] = field(default=())  # names of *args, in order


def run(good: Good) -> Any:
    """The call, and for a stream its first step: what is lazy is refused there at the latest."""
    named = dict(good.arguments)
    first = [named.pop(name) for name in good.positional]
    result = good.function(*first, **named)
    if isinstance(result, Iterator):
        return next(result, None)
    return result


def names_of(function: Callable[..., Any]) -> list[str]:
    """Parameters that can be replaced one at a time."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [parameter.name for parameter in parameters if parameter.kind not in kinds]


def quoted(value: Any, message: str) -> bool:
    """Whether a message shows what was given: the value, its beginning, its type or its shape."""
    if isinstance(value, Tensor):
        marks = [str(tuple(value.shape)), str(value.dtype), str(value.device), "tensor", "Tensor"]
    elif isinstance(value, np.ndarray):
        marks = ["array", "ndarray"]
    else:
        marks = [repr(value)[:20], str(value)[:20], f"{value:,}" if type(value) is int else "\0"]
    if isinstance(value, list | dict):
        marks += [repr(part) for part in value] + [str(part) for part in value]
    marks += [type(value).__name__, re.sub(r" at 0x.*", "", repr(value))[:20]]
    if isinstance(value, int) and abs(value) >= 10**6:
        marks.append("bits")  # a number that is too long to print
    if value in ([], "", b"", {}) if isinstance(value, list | str | bytes | dict) else False:
        marks += ["no ", "empty", "none", "at least one", "''"]
    return any(mark and mark in message for mark in marks)


def fault_of(make: Callable[[], Good], argument: str, label: str) -> str | None:
    """What was wrong with how a call took one wrong value; ``None`` if nothing, "" if it took it.

    "took it" is no fault by itself: a number where a float is wanted is fine.
    """
    good, value = make(), wrong_values()[label]
    good.arguments[argument] = value
    before = good.state()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        run(good)
    except (ValueError, TypeError) as error:
        message = f"{error}"
        if good.state() != before:
            return f"{type(error).__name__} after something had changed: {message:.100}"
        if not quoted(value, message):
            return f"{type(error).__name__} that does not quote the value: {message:.100}"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.100}"
    finally:
        signal.alarm(0)
    return ""


class TooLongError(BaseException):
    """A call that does not end. No Exception, so that nothing on the way catches it."""


def _too_long(*_: object) -> None:
    raise TooLongError(f"more than {SECONDS} s")
