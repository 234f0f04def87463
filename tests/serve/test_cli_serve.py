"""``kvbook serve``: what is said before anything is built."""

from importlib.machinery import ModuleSpec

import pytest

from kvbook.cli import main, serve


def test_without_its_packages_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(name: str) -> ModuleSpec | None:
        return None if name == "uvicorn" else ModuleSpec(name, None)

    monkeypatch.setattr(serve, "find_spec", found)
    assert main(["serve"]) == 2
    message = capsys.readouterr().err
    assert "serving needs uvicorn" in message
    assert "pip install 'kvbook[serve]'" in message


def test_a_folder_that_is_no_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-folder"]) == 2
    assert "no-such-folder" in capsys.readouterr().err


@pytest.mark.parametrize("change", [["--blocks", "x"], ["--dtype", "int8"], ["--rowz"]])
def test_bad_options_are_one_line(change: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *change])
    assert ended.value.code == 2
    assert change[-1] in capsys.readouterr().err
