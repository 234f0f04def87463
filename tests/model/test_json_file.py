"""A JSON file that somebody else wrote: read whole, or refused by name."""

from pathlib import Path

import pytest

from kvbook import WeightFileError
from kvbook.model import json_file
from kvbook.model.json_file import read_object


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "some.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_an_object_comes_back(tmp_path: Path) -> None:
    content = '{"a": [1, -2.5, null, true], "b": {"a": "é"}}'
    assert read_object(write(tmp_path, content)) == {"a": [1, -2.5, None, True], "b": {"a": "é"}}


DEEP = 10_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ('{"a": 1', "is not JSON"),
        ("[1, 2]", r"holds \[1, 2\], not an object"),
        ("null", "holds None, not an object"),
        ('{"a": 1, "b": 2, "a": 3}', "the field 'a' is there twice"),
        ('{"x": {"a": 1, "a": 1}}', "the field 'a' is there twice"),
        ('{"a": NaN}', "NaN is no finite number"),
        ('{"a": -Infinity}', "-Infinity is no finite number"),
        ('{"a": 1e999}', "1e999 is no finite number"),
        ('{"a": ' + "[" * DEEP + "]" * DEEP + "}", "recursion"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "recursion"),
        ('{"a": ' + "9" * 5_000 + "}", "is not JSON"),
        (b'{"a": "\xff"}', "is not JSON"),
    ],
)
def test_what_is_no_plain_object_is_refused(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightFileError, match=rf"some\.json .*{message}"):
        read_object(write(tmp_path, content))


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MOST_BYTES", 8)
    assert read_object(write(tmp_path, '{"a": 1}')) == {"a": 1}
    with pytest.raises(WeightFileError, match="it has 9 bytes, more than 8"):
        read_object(write(tmp_path, '{"a": 12}'))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"gone\.json is not JSON"):
        read_object(tmp_path / "gone.json")
