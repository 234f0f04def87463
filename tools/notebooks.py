"""Runs the chapters, writes them in one normal form, and tests them outside the repository.

Knows where chapters are, what a notebook file may hold, and how to start a kernel. Does not know
what a chapter must contain (tools.rules) or whether its numbers are bound (tools.numbers).

    python -m tools.notebooks execute [FILE ...]     run in place, then normalize
    python -m tools.notebooks normalize [FILE ...]   normalize alone
    python -m tools.notebooks test [--jobs N]        run in an empty folder, compare every output
"""

import argparse
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from tools import folding, reading

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
CELL_SECONDS = 120
NOTEBOOK_SECONDS = 60
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
# Anything else is what some editor left behind.
CELL_METADATA = ("cellView", "collapsed", "jupyter", "mystnb", "tags")
_CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)


def chapters(book: Path = BOOK) -> list[Path]:
    """The notebooks of the book, in the order of their names.

    Raises ValueError if there are none: an empty book must not pass any check.
    """
    found = sorted(book.glob("*.ipynb"))
    if not found:
        raise ValueError(f"no notebooks in {book.name}/: expected at least one *.ipynb there")
    return found


def find(name: str) -> Path:
    """The notebook of that file name, or the one in book/ whose name starts so.

    Raises ValueError if it is none or more than one.
    """
    if Path(name).is_file():
        return Path(name)
    found = [path for path in chapters() if path.name.startswith(Path(name).name)]
    if len(found) != 1:
        names = ", ".join(path.stem for path in chapters())
        raise ValueError(f"{name!r} names {len(found)} chapters; expected one of {names}")
    return found[0]


def read(path: Path) -> NotebookNode:
    """The notebook as it is on disk. nbformat's own reader would invent random cell ids."""
    notebook = nbformat.from_dict(json.loads(path.read_text(encoding="utf-8")))
    if notebook.get("nbformat") != 4:
        raise ValueError(
            f"{path.name}: notebook format {notebook.get('nbformat')} is not supported; "
            "save it as format 4 in JupyterLab"
        )
    for cell in notebook.cells:
        cell.source = _joined(cell.source)
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = _joined(output.text)
            for kind, data in output.get("data", {}).items():
                if not kind.endswith("json"):
                    output.data[kind] = _joined(data)
    return notebook


def dumps(notebook: NotebookNode) -> str:
    """The text of the file: sorted keys, an indent of one, one newline at the end."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def write(notebook: NotebookNode, path: Path) -> None:
    """Replaces the file in one step, so that a failure leaves the old one whole."""
    text = dumps(notebook)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    os.replace(partial, path)


def python_of(source: str) -> str:
    """The cell as plain Python, line for line: each magic or shell line becomes `pass`."""
    if source.startswith("%%"):
        return ""
    return _MAGIC.sub(r"\1pass", source)


def normalize(notebook: NotebookNode) -> NotebookNode:
    """A copy without anything that changes when the content does not, folded as its tags say.

    Kept: sources, outputs, execution counts, the cell metadata that the book uses, and cell ids
    that are present and unique. Other ids are derived from the cell's type and source. The
    reading time under the title is counted again.
    """
    result = copy.deepcopy(notebook)
    result.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC})
    result.nbformat_minor = 5
    ids: set[str] = set()
    for cell in result.cells:
        if cell.cell_type == "code":
            cell.outputs = _merged_streams(cell.outputs)
        folding.apply(cell)
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in CELL_METADATA if cell.metadata.get(key)}
        )
        cell.id = _cell_id(cell, ids)
        ids.add(cell.id)
    reading.set_time(result)
    return result


class CellFailure(ValueError):
    """A cell raised, took too long or lost its kernel; the message says which and why."""


def execute(notebook: NotebookNode) -> NotebookNode:
    """A normalized copy with fresh outputs, run from the top in a new kernel of this interpreter.

    The kernel starts in an empty folder, so a chapter cannot lean on files beside it.
    Raises CellFailure.
    """
    fresh = normalize(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # With no folders to search, the one kernel left is this interpreter's own.
    specs = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    with tempfile.TemporaryDirectory() as folder, this_tree() as environment:
        client = NotebookClient(
            fresh,
            km=manager,
            timeout=CELL_SECONDS,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute(stderr=subprocess.DEVNULL, env=environment)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            begun = [cell.id for cell in fresh.cells if cell.get("execution_count")]
            where = f"cell {begun[-1]}" if begun else "the first cell"
            raise CellFailure(f"{where}: {_COLOR.sub('', str(error))}") from error
    sealed = normalize(fresh)
    for cell in sealed.cells:
        for output in cell.get("outputs", []):
            if mark := seal(output):
                output.metadata["seal"] = mark
    return sealed


def seal(output: NotebookNode) -> str:
    """A hash of a figure's formats together, set when one run drew them; "" without a figure.

    The notebook test compares the SVG alone. The seal tells whether the PNG beside it is still the
    one that was drawn with it.
    """
    data = output.get("data", {})
    images = [data[kind] for kind in sorted(data) if kind.startswith("image/")]
    return hashlib.sha256("\n".join(images).encode()).hexdigest()[:16] if images else ""


@contextmanager
def this_tree() -> Iterator[dict[str, str]]:
    """The environment of a process that finds the kvbook of this checkout and nothing else of it.

    It is passed on (OMP_NUM_THREADS and the like) except for PYTHONPATH, which names a folder
    that holds a link to kvbook alone: a kvbook that is installed from elsewhere comes second.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kvbook").symlink_to(ROOT / "kvbook", target_is_directory=True)
        yield {**os.environ, "PYTHONPATH": folder}


def normalize_all(paths: list[Path]) -> None:
    for path in paths:
        write(normalize(read(path)), path)


def execute_all(paths: list[Path]) -> int:
    """Runs each file in place; one that fails is reported and stays as it was. Exit code 0 or 1."""
    failed = 0
    for path in paths:
        started = time.perf_counter()
        try:
            write(execute(read(path)), path)
        except CellFailure as error:
            failed += 1
            print(f"{path.name}: FAILED, file left as it was, {error}", file=sys.stderr)
        else:
            print(f"{path.name}: executed in {time.perf_counter() - started:.1f} s")
    return 1 if failed else 0


def test(paths: list[Path], jobs: int) -> int:
    """Runs copies of the notebooks under nbval in a folder that holds nothing else.

    They find the kvbook of this checkout, and no variable changes what pytest does. Returns
    pytest's exit code.
    """
    temporary = tempfile.TemporaryDirectory
    with temporary() as folder, temporary() as aside, this_tree() as environment:
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            environment.pop(name, None)
        # Each process takes its share of the cores: more threads than cores are slower.
        share = max(1, (os.cpu_count() or 1) // max(1, jobs))
        environment.setdefault("OMP_NUM_THREADS", str(share))
        for path in paths:
            shutil.copy(path, folder)
        report = Path(aside) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"]
        command += [f"--nbval-cell-timeout={CELL_SECONDS}", "-n", str(jobs), "--dist", "loadfile"]
        command += ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"]
        command += ["--durations=10", f"--junitxml={report}", *(path.name for path in paths)]
        code = subprocess.run(command, cwd=folder, env=environment).returncode
        if report.exists():
            print_seconds(report)
    return code


def print_seconds(report: Path) -> None:
    """Prints how long each notebook took, from pytest's JUnit report."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.get("classname", "")] += float(case.get("time", 0))
    print("seconds per notebook, kernel start included:")
    for name, spent in sorted(seconds.items()):
        over = f"  over the {NOTEBOOK_SECONDS} s allowed" if spent > NOTEBOOK_SECONDS else ""
        print(f"  {name.removesuffix('.ipynb'):<40} {spent:6.1f}{over}")


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _cell_id(cell: NotebookNode, taken: set[str]) -> str:
    given = cell.get("id", "")
    if _CELL_ID.fullmatch(given) and given not in taken:
        return given
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
    derived, copies = f"{cell.cell_type}-{digest}", 1
    while derived in taken:
        copies += 1
        derived = f"{cell.cell_type}-{digest}-{copies}"
    return derived


def _merged_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One output per run of the same stream, and errors without their traceback.

    A traceback holds colors, paths and line numbers of one machine; name and message remain.
    """
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if output.output_type == "error":
            output.traceback = [f"{output.ename}: {output.evalue}"]
        same = last is not None and last.output_type == output.output_type == "stream"
        if same and last is not None and last.name == output.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks")
    parser.add_argument("command", choices=("execute", "normalize", "test"))
    parser.add_argument(
        "paths", nargs="*", help="files, or numbers such as 01; default: all of book/"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes for the test (default 2)")
    options = parser.parse_intermixed_args(arguments)
    try:
        paths = [find(name) for name in options.paths] or chapters()
        if options.command == "test":
            return test(paths, options.jobs)
        if options.command == "execute":
            return execute_all(paths)
        normalize_all(paths)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
