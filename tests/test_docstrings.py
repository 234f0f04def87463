"""Every example in a docstring of the package runs and gives what it says."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import kvbook

ROOT = Path(kvbook.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(name_of(path) for path in ROOT.rglob("*.py") if path.name != "__main__.py")


def examples(module: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(import_module(module))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_hold(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    runner = doctest.DocTestRunner()
    for test in examples(module):
        runner.run(test)
    assert not runner.failures, capsys.readouterr().out


def test_the_examples_are_found() -> None:
    """A finder that finds nothing would pass the test above."""
    with_examples = {module for module in MODULES if examples(module)}
    assert {"kvbook.model.rope", "kvbook.cache.view", "kvbook.measure.bytes"} <= with_examples
    assert len(with_examples) >= 16


def test_an_example_that_is_wrong_is_seen() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1
