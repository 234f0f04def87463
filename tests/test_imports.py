"""Who may import whom, read from the source of every module; and what a bare import costs."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import kvbook

ROOT = Path(kvbook.__file__).parent

# A room is a module or a sub-package of kvbook. It may import itself and the rooms named here.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "accounting": {"config", "errors"},
    "cache": {"config", "errors"},
    "model": {"cache", "config", "errors"},
    "generate": {"model", "cache", "config", "errors"},
    "serve": {"generate", "model", "cache", "config", "errors"},
    "measure": {"accounting", "generate", "model", "cache", "config", "errors"},
    "plots": set(),
    "cli": {"accounting", "errors", "measure", "model", "serve"},  # 3 inside a command
    "__main__": {"cli"},
}
WITHOUT_TORCH = ["errors", "config", "accounting"]
ON_TOP = ["plots", "cli"]  # imported by nothing but `python -m kvbook`


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
INSIDE = [name for name in MODULES if name != "kvbook"]


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full, from kvbook…"
            # `from kvbook import cache` names a module; `from kvbook.cache import X` need not.
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & MODULES.keys()) or {str(node.module)}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def test_the_modules_are_found() -> None:
    assert {"kvbook", "kvbook.config", "kvbook.cache.cache", "kvbook.model.rope"} <= MODULES.keys()
    assert "kvbook.cache.view" in imports(MODULES["kvbook.cache.step"])


def test_every_room_has_its_arrows() -> None:
    assert {room(name) for name in INSIDE} <= set(ARROWS), "write down what the new room may import"


@pytest.mark.parametrize("module", INSIDE)
def test_imports_go_along_the_arrows(module: str) -> None:
    used = {name for name in imports(MODULES[module]) if name.split(".")[0] == "kvbook"}
    assert "kvbook" not in used, "import from the module that defines the name"
    rooms = {room(name) for name in used} - {room(module)}
    assert rooms <= ARROWS[room(module)]


def test_the_arrows_make_no_circle() -> None:
    assert set(TopologicalSorter(ARROWS).static_order()) == set(ARROWS)


def test_neither_do_the_modules() -> None:
    graph = {name: imports(path) & set(INSIDE) for name, path in MODULES.items() if name in INSIDE}
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("top", ON_TOP)
def test_nothing_imports_what_stands_on_top(top: str) -> None:
    assert all(top not in rooms for room, rooms in ARROWS.items() if room != "__main__")


@pytest.mark.parametrize("module", [name for name in INSIDE if room(name) in WITHOUT_TORCH])
def test_sizes_and_errors_need_the_standard_library_only(module: str) -> None:
    for name in imports(MODULES[module]):
        assert name.split(".")[0] in sys.stdlib_module_names | {"kvbook"}


@pytest.mark.parametrize("module", INSIDE)
def test_a_module_says_what_it_knows_and_what_not(module: str) -> None:
    docstring = ast.get_docstring(ast.parse(MODULES[module].read_text())) or ""
    assert docstring
    if MODULES[module].name != "__init__.py":
        words = " ".join(docstring.split())
        assert "Knows: " in words
        assert "Does not know: " in words


# ---- Loading on first use


def loaded_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running the code."""
    code += "\nimport sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_a_bare_import_loads_no_torch() -> None:
    heavy = {"torch", "numpy", "matplotlib", "gguf", "tokenizers", "safetensors"}
    assert not loaded_after("import kvbook") & heavy
    assert not loaded_after("from kvbook import ModelConfig, CacheFullError") & heavy


def test_a_model_loads_torch_but_nothing_that_reads_files_or_draws() -> None:
    loaded = loaded_after("from kvbook import Transformer, KVCache, Sampler")
    assert "torch" in loaded
    assert not loaded & {"matplotlib", "gguf", "tokenizers", "safetensors"}


@pytest.mark.parametrize("name", kvbook.__all__)
def test_every_public_name_is_there(name: str) -> None:
    home = import_module(kvbook._MODULE_OF[name])
    assert getattr(kvbook, name) is getattr(home, name)


def test_a_public_name_is_the_same_whatever_was_imported_before() -> None:
    """A sub-package of the same name would take the place of a function once it is loaded."""
    assert not set(kvbook.__all__) & {room(name) for name in INSIDE}


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    tree = ast.parse(MODULES["kvbook"].read_text())
    block = next(
        node for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )  # fmt: skip
    stated = {
        str(node.module): sorted(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert stated == {module: sorted(names) for module, names in kvbook._HOME.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'kvbook' has no attribute 'nothing'"):
        _ = kvbook.nothing


def test_tab_completion_offers_the_public_names() -> None:
    assert set(kvbook.__all__) <= set(dir(kvbook))
