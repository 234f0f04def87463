"""Ways to spoil a file: its bytes, its JSON, the header of a safetensors file.

Every mutation takes a generator of random numbers and content, and returns content and a few words
on what was done.
"""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Mutation = Callable[[random.Random, bytes], tuple[bytes, str]]

DEEP = 10_000
NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
FLOATS = ["NaN", "Infinity", "-Infinity", "1e999", "-0.0", "1.5"]
TEXTS = ["", "\0", "..", "../x", "é" * 50, "x" * 10_000, "\ud800", "I8", "F8_E4M3", "float31"]


# ---- Bytes


def truncated(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    keep = draw.choice([0, 1, 7, 8, 9, draw.randrange(len(content)), len(content) - 1])
    return content[:keep], f"cut to {keep} bytes"


def bit_flipped(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at, bit = _place(draw, content), draw.randrange(8)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :], f"bit {bit} of {at}"


def number_written(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """A count, size, offset or type becomes one of the numbers that overflow something."""
    at, width = _place(draw, content), draw.choice([1, 2, 4, 8])
    number = draw.choice(NUMBERS) % 2 ** (8 * width)
    part = number.to_bytes(width, "little")
    return content[:at] + part + content[at + width :], f"{number} in {width} bytes at {at}"


def slice_removed(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at, count = _place(draw, content), draw.randint(1, 64)
    return content[:at] + content[at + count :], f"{count} bytes gone at {at}"


def slice_repeated(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at, count = _place(draw, content), draw.randint(1, 200)
    part = content[at : at + count]
    return content[:at] + part + content[at:], f"{count} bytes twice at {at}"


def noise_inserted(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at, count = _place(draw, content), draw.randint(1, 64)
    return content[:at] + draw.randbytes(count) + content[at:], f"{count} random bytes at {at}"


def zeros_written(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at, count = _place(draw, content), draw.randint(1, 200)
    return content[:at] + bytes(count) + content[at + count :], f"{count} zeros at {at}"


def _place(draw: random.Random, content: bytes) -> int:
    """Mostly near the start, where headers are."""
    return draw.randrange(min(len(content), draw.choice([32, 256, 2048, len(content)])))


BYTES: list[Mutation] = [
    truncated, bit_flipped, number_written, slice_removed, slice_repeated, noise_inserted,
    zeros_written,
]  # fmt: skip


# ---- JSON


class Verbatim(str):
    """What the writer puts into the file as it is: NaN, ten thousand brackets."""


def json_changed(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """One value somewhere in the tree is replaced, taken out, or wrapped."""
    tree = json.loads(content)
    holder, key, where = _somewhere(draw, tree)
    action = draw.choice(["replace", "replace", "replace", "remove", "wrap", "rename"])
    if action == "replace":
        holder[key] = value = _odd_value(draw)
        return _dump(tree), f"{where} = {value!r:.40}"
    if action == "wrap":
        holder[key] = draw.choice([[holder[key]], {"x": holder[key]}])
        return _dump(tree), f"{where} wrapped"
    value = holder.pop(key)
    if action == "rename" and isinstance(holder, dict):
        holder[draw.choice(TEXTS[:5])] = value
    return _dump(tree), f"{where} {action}d"


def key_repeated(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """A field of the outermost object is there twice, with another value the second time."""
    tree = json.loads(content)
    name = draw.choice(sorted(tree))
    extra = json.dumps(name) + ": " + _text(_odd_value(draw))
    return _dump(tree)[:-1] + b", " + extra.encode(errors="surrogatepass") + b"}", f"{name} twice"


def nested(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    deep = draw.choice(["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP])
    tree = json.loads(content)
    holder, key, where = _somewhere(draw, tree)
    holder[key] = Verbatim(deep)
    return _dump(tree), f"{DEEP} levels at {where}"


def other_json(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    text = draw.choice(["[]", "{}", "null", "3", '"x"', "[[]]", '{"": {}}', "", " ", "\ufeff{}"])
    return text.encode(), f"the file is {text!r}"


def _somewhere(draw: random.Random, tree: Any) -> tuple[Any, Any, str]:
    """A place in the tree: what holds it, its key or index, and the path to it."""
    holder, key, path = {"": tree}, "", ""
    while True:
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or (path and draw.random() < 0.3):
            return holder, key, path
        holder = inner
        key = draw.choice(sorted(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        path += f"/{key}"


def _odd_value(draw: random.Random) -> Any:
    return draw.choice([
        None, True, False, [], {}, [1, "2"], {"a": []}, Verbatim(draw.choice(FLOATS)),
        draw.choice(NUMBERS), draw.choice(NUMBERS), -draw.choice(NUMBERS), draw.choice(TEXTS),
        Verbatim("9" * 5_000),
    ])  # fmt: skip


def _dump(tree: Any) -> bytes:
    return _text(tree).encode(errors="surrogatepass")


def _text(tree: Any) -> str:
    if isinstance(tree, Verbatim):
        return str(tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_text(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_text, tree)) + "]"
    return json.dumps(tree)


JSON: list[Mutation] = [json_changed, json_changed, json_changed, key_repeated, nested, other_json]


# ---- safetensors: eight bytes of length, a header of JSON, the data


def _in_header(mutate: Mutation) -> Mutation:
    def changed(draw: random.Random, content: bytes) -> tuple[bytes, str]:
        (length,) = struct.unpack("<Q", content[:8])
        header, what = mutate(draw, content[8 : 8 + length])
        return struct.pack("<Q", len(header)) + header + content[8 + length :], f"header: {what}"

    return changed


HEADER: list[Mutation] = [_in_header(mutation) for mutation in JSON]
