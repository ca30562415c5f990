"""The folders import each other in one direction only, torch stays in engine/, policies need numpy alone."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "policies": set(),
    "jobs": set(),
    "engine": {"policies"},
    "runner": {"jobs", "engine", "policies"},
}
TORCH = {"torch", "torchvision", "torchaudio", "triton"}


def siblings(source: str, depth: int) -> set[str]:
    """Names under `specrun` that a module imports relatively, anywhere in it; depth is the dots that reach there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
    return found


def packages(source: str) -> set[str]:
    """Top-level packages that a module imports absolutely, anywhere in it, by statement or by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found |= {str(a.value).split(".")[0] for a in node.args[:1] if isinstance(a, ast.Constant)}
    return found


def modules(folder: str) -> Iterator[tuple[str, str, int]]:
    """Path, source and the dots that reach `specrun`, of every module of a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text(), len(path.relative_to(ROOT / folder).parts) + 1


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder):
    for name, source, depth in modules(folder):
        assert siblings(source, depth) - {folder, "__version__"} <= ALLOWED[folder], name


@pytest.mark.parametrize("folder", ALLOWED)
def test_our_own_packages_are_imported_relatively(folder):
    for name, source, _ in modules(folder):
        assert not packages(source) & {"specrun", *ALLOWED}, f"{name}: use a relative import"


@pytest.mark.parametrize("folder", sorted(set(ALLOWED) - {"engine"}))
def test_torch_is_imported_in_engine_only(folder):
    for name, source, _ in modules(folder):
        assert not packages(source) & TORCH, name


def test_policies_need_the_standard_library_and_numpy_only():
    for name, source, _ in modules("policies"):
        assert packages(source) <= {"numpy", *sys.stdlib_module_names}, name


def test_these_checks_can_fail():
    hidden = "def load():\n    if True:\n        from torch.nn import functional\n"
    assert packages(hidden) == {"torch"}
    assert packages("import os, torch.cuda as c") == {"os", "torch"}
    assert packages("importlib.import_module('torch')\n__import__('triton.language')") == {"torch", "triton"}
    assert siblings("def f():\n    from ..jobs.spec import JobSpec\n    from .. import runner, jobs", 2) == {
        "jobs",
        "runner",
    }
    assert siblings("from ..request import Request", 3) == set()
