"""The house rules that no linter knows: prints one line per breach and exits 1 where there is one.

`python scripts/house_rules.py` checks the package's Python files, and `--size FILE ...` the size of
the files named. CONTRIBUTING.md says why each rule is there.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST_FILE_BYTES = 13 * 1024 * 1024
LINE_LIMIT = 500
KERNEL_LINE_LIMIT = 600
DRAWERS = {"utils", "util", "helpers", "common", "misc"}
TUNED = {
    "block_m",
    "block_n",
    "num_warps",
    "num_stages",
    "maxnreg",
    "waves_per_eu",
    "matrix_instr_nonkdim",
}
UNTUNED_MARK = "# not tuned:"
FOLDER_LIMIT = 15
JIT_PARAMETER_LIMIT = 20


def breaches(root: Path = ROOT) -> list[str]:
    """Check every Python file of the package below `root`."""
    found = []
    classes: dict[str, str] = {}
    sizes: Counter[str] = Counter()
    for path in sorted((root / "sage_plugin").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        sizes[path.parent.relative_to(root).as_posix()] += path.name != "__init__.py"
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=name)
        for line, message in sorted(_file_breaches(name, text, tree)):
            found.append(f"{name}:{line}: {message}")
        for line, class_name in _classes(tree):
            if class_name in classes:
                found.append(
                    f"{name}:{line}: {classes[class_name]} has a class {class_name} too: "
                    "name each with the words of its field"
                )
            classes.setdefault(class_name, name)
    return found + list(_crowded(sizes))


def oversized(paths: list[Path]) -> list[str]:
    """Check the size of files before they enter the repository."""
    return [
        f"{path}: {path.stat().st_size / 2**20:.1f} MiB, at most {LARGEST_FILE_BYTES / 2**20:.0f}"
        for path in paths
        if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES
    ]


def _classes(tree: ast.Module) -> list[tuple[int, str]]:
    return sorted(
        (node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )


def _crowded(sizes: Mapping[str, int]) -> Iterator[str]:
    """Name each folder that holds too much."""
    for folder, size in sorted(sizes.items()):
        if size > FOLDER_LIMIT:
            yield f"{folder}: {size} Python files, at most {FOLDER_LIMIT}: split by noun"


def _file_breaches(name: str, text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    path = Path(name)
    lines = text.splitlines()
    if path.stem in DRAWERS:
        yield 1, f"a file called {path.name} is a drawer: name the noun that it holds"
    limit = KERNEL_LINE_LIMIT if _holds_kernels(path) else LINE_LIMIT
    if len(lines) > limit:
        yield limit + 1, f"{len(lines)} lines, at most {limit}: split by noun"
    in_cli = name.startswith("sage_plugin/cli/")
    for node in ast.walk(tree):
        if name != "sage_plugin/settings.py" and _reads_environment(node):
            yield node.lineno, "only sage_plugin/settings.py reads the environment"
        if not in_cli and _calls(node, "print"):
            yield node.lineno, "only sage_plugin/cli prints: use logging"
        if _unpickles(node):
            yield node.lineno, "nothing is pickled: use safetensors or JSON"
        if _swallows(node):
            yield node.lineno, "an exception is swallowed: name it, or say what was done about it"
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
            yield from _signature_breaches(node)
            yield from _uncarried(node.body, {})
        if "search_space" not in (path.stem, path.parent.name) and "/kernels/" in name:
            for line, knob in _tuning_numbers(node):
                if UNTUNED_MARK not in lines[line - 1]:
                    yield (
                        line,
                        f"{knob} is a tuning number: it belongs in search_space/ or configs/ "
                        f"(or say why it is not: `{UNTUNED_MARK} ...`)",
                    )


def _holds_kernels(path: Path) -> bool:
    return path.stem == "primitives" or path.stem.endswith(("_kernel", "_kernels"))


def _calls(node: ast.AST, function: str) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    )


def _reads_environment(node: ast.AST) -> bool:
    names = ("environ", "environb", "getenv", "getenvb")
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in names
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return False


def _unpickles(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name in ("pickle", "dill", "cloudpickle") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in ("pickle", "dill", "cloudpickle")
    if isinstance(node, ast.Call) and _is_torch_file(node.func):
        return not any(
            k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in node.keywords
        )
    return False


def _is_torch_file(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in (("torch", "load"), ("torch", "save"))
    )


def _swallows(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    broad = node.type is None or (
        isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
    )
    return broad and all(isinstance(statement, ast.Pass) for statement in node.body)


def _is_jit(decorator: ast.expr) -> bool:
    """`triton.jit`, `gluon.jit(...)` and every other name that ends so."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).endswith("jit")


def _signature_breaches(node: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Name a jit function that takes too much."""
    count = sum(isinstance(one, ast.arg) for one in ast.walk(node.args))
    if count > JIT_PARAMETER_LIMIT:
        yield (
            node.lineno,
            f"{node.name} takes {count} parameters, at most {JIT_PARAMETER_LIMIT}: pass a tuple",
        )


def _uncarried(body: list[ast.stmt], same: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Names that a loop of jit code forgets: `x = y` before it, and `x = y` first thing in it.

    Triton walks a loop's body once to see what it carries: names that mean something else after it.
    Such an `x` does not, and is what it was before the loop in every turn.

    Args:
        body: statements in turn.
        same: names that mean the very value of another name so far, and that other name.
    """
    for statement in body:
        if isinstance(statement, ast.For | ast.While):
            inside = dict(same)
            for line, x, y in _assigned(statement.body):
                if y is not None and inside.get(x) == y:
                    yield line, f"the loop does not carry {x}: start it with a value of its own"
                inside = _without(inside, x)
            yield from _uncarried(statement.body, {})
        elif isinstance(statement, ast.If):
            yield from _uncarried(statement.body, dict(same))
            yield from _uncarried(statement.orelse, dict(same))
        for _line, x, y in _assigned([statement]):
            same = _without(same, x)
            if y is not None and isinstance(statement, ast.Assign):
                same[x] = y


def _without(same: Mapping[str, str], name: str) -> dict[str, str]:
    """Pairs of names that are equal, when one gets a new value."""
    return {x: y for x, y in same.items() if name not in (x, y)}


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[int, str, str | None]]:
    """Line, name, and the name that it becomes another word for, of all assignments below."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        plain = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        alias = node.value.id if plain else None
        names = (one.id for target in targets for one in ast.walk(target)
                 if isinstance(one, ast.Name))  # fmt: skip
        yield from ((node.lineno, name, alias) for name in names)


def _tuning_numbers(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Integer literals given to a tuned name, as a keyword or in a dict.

    The `num_stages` of a loop inside a kernel (`tl.range`) is part of its code, not of its launch.
    """
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Call) and ast.unparse(node.func) != "tl.range":
        pairs = [(word.arg, word.value) for word in node.keywords if word.arg]
    elif isinstance(node, ast.Dict):
        pairs = [
            (key.value, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
    for name, value in pairs:
        if name.lower() in TUNED and isinstance(value, ast.Constant) and type(value.value) is int:
            yield value.lineno, name


def main(arguments: list[str]) -> int:
    """Print the breaches; 1 where there are any."""
    if arguments[:1] == ["--size"]:
        found = oversized([Path(argument) for argument in arguments[1:]])
    else:
        found = breaches()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
