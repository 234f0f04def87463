"""The package as a whole: what it loads, and that its examples are true."""

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvbook.accounting

WITH_EXAMPLES = ("units", "formats", "flops", "geometry", "need", "card", "pool", "nearest")
MODULES = sorted(path.stem for path in Path(kvbook.accounting.__path__[0]).glob("*.py"))


def test_it_needs_no_torch() -> None:
    code = "import kvbook.accounting, sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy"} & set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    name = "kvbook.accounting" if module == "__init__" else f"kvbook.accounting.{module}"
    assert doctest.testmod(import_module(name)).failed == 0


def test_some_modules_have_examples() -> None:
    found = {
        module for module in WITH_EXAMPLES
        if doctest.DocTestFinder(exclude_empty=True).find(
            import_module(f"kvbook.accounting.{module}")
        )
    }  # fmt: skip
    assert found == set(WITH_EXAMPLES)


@pytest.mark.parametrize("name", kvbook.accounting.__all__)
def test_every_public_name_is_explained(name: str) -> None:
    found = getattr(kvbook.accounting, name)
    assert isinstance(found, dict) or found.__doc__
