# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_dflash

PACKAGE = Path(sglang_dflash.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted([*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50  # the docstring not counted
MAX_KERNEL_LINES = 120
# Who may know SGLang's types. All others take tensors and plain dataclasses.
KNOWS_SGLANG = (
    "plugin.py",
    "worker.py",
    "state.py",
    "seams.py",
    "verify/first_rank.py",
    "verify/forward.py",
    "verify/graphs.py",
    "verify/constraints.py",
    "verify/decide.py",
    "verify/processors.py",
    "corrections.py",
    "defaults.py",
    "finish.py",
    "sweep.py",
    "draft/model.py",
    "draft/hot_head.py",
    "draft/token_map.py",
    "cpu/",
    "demo/serve.py",
    "doctor.py",
    "draft/forward.py",
)
SPEAKS_TO_SERVERS = ("errors.py", "plugin.py", "admission.py")  # errors.py: by default
NEEDS_NO_TORCH = ("draft/config.py", "draft/schema.py", "draft/checks.py", "draft/weights.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef
each_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Yield public functions, and public methods of public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (n for n in node.body if isinstance(n, Function) and n.name[0] != "_")
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def length_of(function: Function) -> int:
    """Return a function's lines without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def imported(tree: ast.AST) -> set[str]:
    """Return the top-level packages that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def tensor_arguments(function: Function) -> list[str]:
    """Return the arguments annotated as a tensor."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [
        argument.arg
        for argument in arguments
        if argument.annotation is not None
        and re.fullmatch(
            r"(torch\.)?Tensor( \| None)?", ast.unparse(argument.annotation).strip("'\"")
        )
    ]


@each_source
def test_file_is_short_and_licensed(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines, "an empty file"
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert len(lines) <= MAX_FILE_LINES


@each_source
def test_functions_are_short(path: Path) -> None:
    limit = MAX_KERNEL_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES
    too_long = {
        function.name: length_of(function)
        for function in functions(parsed(path))
        if length_of(function) > limit
    }
    assert not too_long


@each_module
def test_module_lists_what_is_public(path: Path) -> None:
    tree = parsed(path)
    lists = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    has_code = any(not isinstance(node, ast.Expr) for node in tree.body)
    assert lists or not has_code


@each_module
def test_only_some_modules_know_sglang(path: Path) -> None:
    if not name_of(path).startswith(KNOWS_SGLANG):
        assert "sglang" not in imported(parsed(path))


@each_module
def test_the_servers_options_for_models_are_spelt_in_one_place(path: Path) -> None:
    """What spells them in a message cannot be named as `convert` and `train` were given it."""
    if name_of(path) not in SPEAKS_TO_SERVERS:
        assert not re.search(r"--(speculative-draft-)?model-path\b", path.read_text("utf-8"))


@pytest.mark.parametrize("name", NEEDS_NO_TORCH)
def test_checkpoints_are_read_without_torch(name: str) -> None:
    assert "torch" not in imported(parsed(PACKAGE / name))


@each_module
def test_public_functions_say_the_shapes_of_their_tensors(path: Path) -> None:
    """Argument by argument; a docstring of one paragraph gives them where it likes."""
    silent = [
        f"{function.name}({argument})"
        for function in public_functions(parsed(path))
        for argument in tensor_arguments(function)
        if not says_shape(ast.get_docstring(function) or "", argument)
    ]
    assert not silent


def says_shape(docstring: str, argument: str) -> bool:
    if "\n\n" not in docstring:
        return "[" in docstring or docstring.startswith("See `")  # a kernel's reference
    return re.search(rf"\b{argument}\b[^\n]*(\[|unused)", docstring) is not None


@each_source
def test_no_exception_is_swallowed_wholesale(path: Path) -> None:
    broad = [
        handler.lineno
        for handler in ast.walk(parsed(path))
        if isinstance(handler, ast.ExceptHandler)
        and (
            handler.type is None
            or re.search(r"\b(Base)?Exception\b", ast.unparse(handler.type)) is not None
        )
    ]
    assert not broad


@each_source
def test_no_path_of_one_machine(path: Path) -> None:
    found = re.findall(r"[\"' (](/(?:work|root|home|Users|mnt)/[^\s\"']*)", path.read_text("utf-8"))
    assert not found


def test_a_test_that_hangs_is_ended(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 1800


def test_importing_the_package_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_dflash, sglang_dflash.draft.config\n"
        "assert not {'torch', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_rules_see_what_they_forbid() -> None:
    """The checks' own mutants."""
    tree = ast.parse(
        "def long(x: torch.Tensor):\n    '''Doc of x.'''\n" + "    x\n" * 51 + "\n"
        "def nested():\n    from sglang.srt import y\n"
    )
    long = next(iter(public_functions(tree)))
    assert length_of(long) == 52
    assert tensor_arguments(long) == ["x"]
    assert imported(tree) == {"sglang"}
