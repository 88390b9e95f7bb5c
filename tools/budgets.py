"""Hold the tree to its budgets: sizes of files and functions, what no file may do, and what `import strop` costs.

Python source goes in as text, one printed line for each finding comes out. `make check` runs it; exit status 1 means
that something is over budget. Nothing under strop/ is executed, except in the one subprocess that measures the import.

What needs types is left to pyright: `.get` on an object of ours is an error there, because no such object has it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FILE_MAX, FILE_P90 = 600, 400  # lines
FUNCTION_MAX, FUNCTION_P90 = 100, 50  # lines
LOOP_MAX = 150  # lines of one file in strop/loops
POSITIONAL_MAX = 6  # positional parameters, self and cls aside
FIELDS_MAX = 150  # knobs of a default run of GRPO
IMPORT_MAX_S = 1.0  # CPU seconds of `import strop`

BROAD_EXCEPT = PurePosixPath("strop/rollout/groups.py")  # turns a failed episode into a counted outcome
ENVIRONMENT = PurePosixPath("strop/environment.py")
DRAWERS = {"common", "helper", "helpers", "misc", "util", "utils"}
SKIPS = {"pytest.mark.skip", "pytest.mark.xfail", "pytest.skip", "pytest.xfail"}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    path: PurePosixPath
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def p90(values: list[int]) -> int:
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0


def check_module(path: PurePosixPath, text: str) -> list[Finding]:
    """Everything that one file of strop/ can do wrong by itself."""
    tree = ast.parse(text)
    lines = text.count("\n")
    found = [*_unsafe(path, tree), *_environment(path, tree), *_broad(path, tree), *_reflection(path, tree)]
    if lines > FILE_MAX:
        found.append(Finding(path, 1, f"{lines} lines (at most {FILE_MAX})"))
    if "loops" in path.parts and lines > LOOP_MAX:
        found.append(Finding(path, 1, f"a loop of {lines} lines (at most {LOOP_MAX})"))
    if DRAWERS & {path.stem, *path.parts[:-1]}:
        found.append(Finding(path, 1, "a drawer for anything: let each piece live with its user"))
    if tree.body and ast.get_docstring(tree) is None:
        found.append(Finding(path, 1, "no module docstring: say what flows through this file"))
    for function in functions(tree):
        found.extend(_signature(path, function))
    return found


def _signature(path: PurePosixPath, function: Function) -> Iterator[Finding]:
    name, arguments = function.name, function.args
    if length(function) > FUNCTION_MAX:
        yield Finding(path, function.lineno, f"{name} has {length(function)} lines (at most {FUNCTION_MAX})")
    if arguments.kwarg is not None:
        yield Finding(path, function.lineno, f"{name} takes **{arguments.kwarg.arg}: name what it takes")
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    # torch calls an autograd Function by position, and Triton's kernels get every stride and tile size
    exempt = positional[:1] == ["ctx"] or any(ast.unparse(d).endswith(".jit") for d in function.decorator_list)
    if len(positional) > POSITIONAL_MAX and not exempt:
        yield Finding(
            path,
            function.lineno,
            f"{name} takes {len(positional)} positional parameters (at most {POSITIONAL_MAX}): make some keyword-only",
        )


def _unsafe(path: PurePosixPath, tree: ast.AST) -> Iterator[Finding]:
    """Code that runs text or data: eval, exec, pickle and what is built on it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called in ("eval", "exec"):
                yield Finding(path, node.lineno, f"{called}(): nothing here runs text")
            if called == "torch.load" and keywords.get("weights_only") != "True":
                yield Finding(path, node.lineno, "torch.load without weights_only=True unpickles anything")
            if keywords.get("allow_pickle") == "True":
                yield Finding(path, node.lineno, f"{called} with allow_pickle=True unpickles anything")
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in modules:
                if module.split(".")[0] in UNSAFE_MODULES:
                    yield Finding(path, node.lineno, f"imports {module}: records travel as plain arrays and JSON")


def _environment(path: PurePosixPath, tree: ast.AST) -> Iterator[Finding]:
    if path == ENVIRONMENT:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv" | "putenv", lineno=line):
                yield Finding(path, line, f"environment variables are read in {ENVIRONMENT} only")
            case ast.ImportFrom(module="os", names=names, lineno=line):
                if {"environ", "getenv", "putenv"} & {alias.name for alias in names}:
                    yield Finding(path, line, f"environment variables are read in {ENVIRONMENT} only")
            case _:
                pass


def _is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def _broad(path: PurePosixPath, tree: ast.AST) -> list[Finding]:
    """`except Exception` and its kin. One is allowed, in the one file that counts failed episodes."""
    found: list[Finding] = []
    for node in ast.walk(tree):
        caught: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            caught = [*node.args]
        if isinstance(node, ast.ExceptHandler | ast.Call) and any(_is_broad(kind) for kind in caught):
            found.append(Finding(path, node.lineno, "a broad except hides what went wrong: name the exception"))
    return found[1:] if path == BROAD_EXCEPT else found


def _own_classes(tree: ast.AST) -> set[str]:
    """Names in this file that are classes of ours: defined here, or imported from strop with a capital letter."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "strop":
            own |= {alias.asname or alias.name for alias in node.names if alias.name[:1].isupper()}
    return own


def _names(annotation: ast.expr | None) -> set[str]:
    """The classes that an annotation lets a value be: `A`, `A | None`, `A[B]` is an A."""
    match annotation:
        case ast.Name(id=name):
            return {name}
        case ast.BinOp(left=left, right=right):
            return _names(left) | _names(right)
        case ast.Subscript(value=value):
            return _names(value)
        case ast.Constant(value=str(text)):
            return _names(ast.parse(text, mode="eval").body)
        case _:
            return set()


def _own_values(function: Function, own: set[str]) -> set[str]:
    """Names inside a function that hold objects of ours, as far as its annotations and constructor calls say."""
    values = {"self", "cls"}
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if _names(argument.annotation) & own:
            values.add(argument.arg)
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _names(node.annotation) & own:
            values.add(node.target.id)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _names(node.value.func) & own:
            values |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return values


def _reflection(path: PurePosixPath, tree: ast.AST) -> Iterator[Finding]:
    """getattr, hasattr and friends on our own objects. On other people's (a transformers config) they are fair."""
    own, seen = _own_classes(tree), set[ast.AST]()
    for function in functions(tree):
        values = _own_values(function, own)
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
                and node.args
                and isinstance(node.args[0], ast.Name)
                and node.args[0].id in values
                and node not in seen  # a nested function is walked twice
            ):
                seen.add(node)
                yield Finding(path, node.lineno, f"{ast.unparse(node)}: our own objects have declared fields, name one")


def check_tests(path: PurePosixPath, text: str) -> list[Finding]:
    """Every test asserts something, and nothing is skipped without a reason."""
    tree = ast.parse(text)
    asserting = _asserting(tree)
    found = [
        Finding(path, function.lineno, f"{function.name} asserts nothing")
        for function in functions(tree)
        if function.name.startswith("test_") and function.name not in asserting
    ]
    reasoned = {
        call.func
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and (call.args or any(keyword.arg == "reason" for keyword in call.keywords))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in SKIPS and node not in reasoned:
            found.append(Finding(path, node.lineno, f"{ast.unparse(node)} without a reason"))
    return found


def _asserting(tree: ast.AST) -> set[str]:
    """Functions of a file that assert something themselves, or call one of the file that does."""
    asserting: set[str] = set()
    while True:
        more = {
            function.name
            for function in functions(tree)
            if function.name not in asserting and any(_asserts(node, asserting) for node in ast.walk(function))
        }
        if not more:
            return asserting
        asserting |= more


def _asserts(node: ast.AST, asserting: set[str]) -> bool:
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and bool(node.test.value))
    if isinstance(node, ast.Call):
        last = ast.unparse(node.func).rsplit(".", 1)[-1]
        given = last in ("raises", "warns", "fail") or last.lstrip("_").startswith(("assert", "check", "expect"))
        return given or last in asserting
    return False


def check_tree(root: Path) -> tuple[list[Finding], str]:
    """All findings under `root`, and one line of figures."""
    found: list[Finding] = []
    file_lines: list[int] = []
    function_lines: list[int] = []
    tests = 0
    for path in sorted((root / "strop").rglob("*.py")):
        text, relative = path.read_text(encoding="utf-8"), PurePosixPath(path.relative_to(root).as_posix())
        found.extend(check_module(relative, text))
        if text:
            file_lines.append(text.count("\n"))
        function_lines.extend(length(function) for function in functions(ast.parse(text)))
    for path in sorted((root / "tests").rglob("test_*.py")):
        text, relative = path.read_text(encoding="utf-8"), PurePosixPath(path.relative_to(root).as_posix())
        found.extend(check_tests(relative, text))
        tests += sum(function.name.startswith("test_") for function in functions(ast.parse(text)))
    figures: list[str] = []
    for what, lines, most in (("files", file_lines, FILE_P90), ("functions", function_lines, FUNCTION_P90)):
        if p90(lines) > most:
            found.append(Finding(PurePosixPath("strop"), 1, f"p90 of {what}: {p90(lines)} lines (at most {most})"))
        figures.append(f"{len(lines)} {what} (p90 {p90(lines)}, max {max(lines, default=0)} lines)")
    return found, f"{', '.join(figures)}, {tests} test functions"


# Run in a fresh interpreter: what `import strop` costs, what it drags in, and how many knobs a recipe has.
PROBE = """
import json, sys, time
start = time.process_time()
import strop
seconds = time.process_time() - start
torch = "torch" in sys.modules
from typing import get_args
from pydantic import BaseModel
from strop.config.recipe import Recipe
def models(kind):
    return [kind] if isinstance(kind, type) and issubclass(kind, BaseModel) else sum(map(models, get_args(kind)), [])
def fields(model):
    # a section that is null is not of the run: other loops, other samplers
    return sum(sum(map(fields, models(f.annotation))) or 1 for name, f in model.model_fields.items()
               if name == "grpo" or f.default is not None or not models(f.annotation))
print(json.dumps([seconds, torch, fields(Recipe), "torch" in sys.modules]))
"""


def check_import(root: Path) -> tuple[list[Finding], str]:
    """`import strop` stays light, configuration needs no torch, and a recipe stays small enough to read."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=root, check=True, capture_output=True, text=True)
    seconds, torch, fields, config_torch = json.loads(done.stdout)
    package, recipe = PurePosixPath("strop/__init__.py"), PurePosixPath("strop/config/recipe.py")
    found: list[Finding] = []
    if seconds > IMPORT_MAX_S:
        found.append(Finding(package, 1, f"takes {seconds:.2f} s to import (at most {IMPORT_MAX_S})"))
    if torch:
        found.append(Finding(package, 1, "imports torch: import it where it is used"))
    if config_torch:
        found.append(Finding(recipe, 1, "imports torch: a recipe is checked without it"))
    if fields > FIELDS_MAX:
        found.append(Finding(recipe, 1, f"{fields} knobs (at most {FIELDS_MAX})"))
    return found, f"import strop {seconds:.2f} s, {fields} knobs"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    in_tree, tree_figures = check_tree(root)
    at_import, import_figures = check_import(root)
    for finding in (*in_tree, *at_import):
        print(finding)
    print(f"budgets: {len(in_tree) + len(at_import)} findings; {tree_figures}; {import_figures}")
    return 1 if in_tree or at_import else 0


if __name__ == "__main__":
    sys.exit(main())
