"""Code exercises of a chapter, and whether their checks know right answers from wrong ones.

Knows the form of an exercise. Does not know what it asks.

An exercise is a question in Markdown and then four code cells in this order:

1. the stub, in sight: the function NAME without its body, for the reader to fill in
2. `check`: defines `check_NAME(answer) -> str`; what it returns starts with "Right" if the
   answer is right, and says what was given and expected if it is not. The cell ends in
   `print(check_NAME(NAME))`
3. `solution`: defines the function NAME again, and prints what the check says of it
4. `evidence`: `rejects = {"what is wrong": answer, …}`, at least three, and, where more than one
   reading is fair, `accepts = {"which reading": answer, …}`

The cells need nothing from the chapter but its `setup` cells and the exercises before.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbformat import NotebookNode

from tools import notebooks
from tools.chapter import Chapter

REJECTS = 3
EXERCISES = 2
RIGHT = "Right"
KINDS = ("", "check", "solution", "evidence")


@dataclass(frozen=True)
class Exercise:
    """The name of the function that is asked for, and its four cells."""

    name: str
    stub: NotebookNode
    check: NotebookNode
    solution: NotebookNode
    proof: NotebookNode


def of(chapter: Chapter) -> tuple[list[Exercise], list[str]]:
    """The exercises, and what is wrong with the form of others."""
    exercises, faults = [], []
    cells = chapter.notebook.cells
    for index, cell in enumerate(cells):
        if "check" not in cell.metadata.get("tags", []):
            continue
        names = [name for name in _functions(cell) if name.startswith("check_")]
        around = cells[max(0, index - 1) : index + 3]
        if len(names) != 1 or [_kind(c) for c in around] != list(KINDS):
            faults.append(
                f"cell {cell.id}: an exercise is a stub, then a cell `check` that defines one "
                "function check_NAME, `solution`, and `evidence` with the table `rejects`"
            )
            continue
        name = names[0].removeprefix("check_")
        for other in (around[0], around[2]):
            if name not in _functions(other):
                faults.append(f"cell {other.id} does not define {name}()")
        exercises.append(Exercise(name, *around))
    return exercises, faults


def exercises_formed(chapter: Chapter) -> list[str]:
    """At least two exercises, each with its stub, check, solution and wrong answers in order."""
    exercises, faults = of(chapter)
    if len(exercises) < EXERCISES:
        faults.append(f"{len(exercises)} code exercises; at least {EXERCISES}")
    return faults


def judged(chapter: Chapter) -> Iterator[tuple[Exercise, str]]:
    """Runs the exercises; each fault of a check with the exercise that it belongs to."""
    space: dict[str, Any] = {}
    for cell in chapter.code:
        if "setup" in cell.metadata.get("tags", []):
            _run(cell, space)
    exercises, _ = of(chapter)
    for exercise in exercises:
        for cell in (exercise.stub, exercise.check):
            _run(cell, space)
        check, stub = space[f"check_{exercise.name}"], space[exercise.name]
        space["rejects"], space["accepts"] = {}, {}
        for cell in (exercise.solution, exercise.proof):
            _run(cell, space)
        right = {"the solution": space[exercise.name], **space["accepts"]}
        for fault in _faults(check, stub, space["rejects"], right):
            yield exercise, fault


def _faults(
    check: Callable[[object], str],
    stub: object,
    rejects: dict[str, object],
    accepts: dict[str, object],
) -> Iterator[str]:
    if len(rejects) < REJECTS:
        yield f"{len(rejects)} wrong answers in `rejects`; at least {REJECTS}"
    for name, answer in {"the empty stub": stub, **rejects}.items():
        said = check(answer)
        if said.startswith(RIGHT):
            yield f"accepts {name!r}"
        elif len(said) < 20:
            yield f"says only {said!r} to {name!r}: say what was given and what was expected"
    for name, answer in accepts.items():
        said = check(answer)
        if not said.startswith(RIGHT):
            yield f"rejects {name!r}: {said}"


def _kind(cell: NotebookNode) -> str:
    """The cell's tag among KINDS; "" for code in sight, "markdown" for no code."""
    tags = cell.metadata.get("tags", [])
    if cell.cell_type != "code":
        return "markdown"
    return next((tag for tag in KINDS if tag in tags), "")


def _functions(cell: NotebookNode) -> list[str]:
    if cell.cell_type != "code":
        return []
    body = ast.parse(notebooks.python_of(cell.source)).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def _run(cell: NotebookNode, space: dict[str, Any]) -> None:
    exec(compile(notebooks.python_of(cell.source), f"<{cell.id}>", "exec"), space)
