# SPDX-License-Identifier: Apache-2.0
"""What the packaging asks of a machine, and what the pages say of it."""

from __future__ import annotations

import ast
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sglang_dflash import cli

ROOT = Path(__file__).parents[2]


def packaged(name: str) -> object:
    """Return what setup.py passes to setuptools under `name`."""
    calls = [n for n in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if is_setup(n)]
    (value,) = [k.value for call in calls for k in call.keywords if k.arg == name]
    return ast.literal_eval(value)


def is_setup(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"


@pytest.mark.parametrize(
    ("python", "served"), [("3.10", False), ("3.11", True), ("3.12.9", True), ("3.13.0", False)]
)
def test_only_pythons_that_sglang_has_wheels_for_are_taken(python: str, served: bool) -> None:
    assert (python in SpecifierSet(str(packaged("python_requires")))) is served


@pytest.mark.parametrize("page", ["README.md", "docs/compatibility.md"])
def test_the_pages_name_these_pythons(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "3.11 or 3.12 (tested: 3.11)" in text
    assert "Linux on x86-64" in text
    assert "3.11 or newer" not in text


def test_the_page_names_the_demo_s_block_size() -> None:
    assert f"in blocks of {cli._DEMO_BLOCK} tokens" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("package", "brings"),
    [("sglang", "flashinfer-python"), ("sglang", "gguf"), ("flashinfer-python", "tabulate")],
)
def test_what_the_demo_imports_comes_with_sglang(package: str, brings: str) -> None:
    """So that it does not fail at its end where the package was installed without its extra."""
    stated = [Requirement(line) for line in requires(package) or ()]
    always = {canonicalize_name(one.name) for one in stated if one.marker is None}
    assert brings in always
