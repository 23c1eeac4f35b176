"""The source of unit tests: finds the assertions that can run and the names under test.

Every assertion records its execution. A test passes only if one of its assertions was executed.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import math
import re
import symtable
import threading
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FILE = "tests.py"
MARK = "__checked__"  # called when an assertion was executed, with a text of its own
ALIAS = "_program_"  # prefix of a tested function that has the name of a builtin
_METHODS = re.compile(r"test.*|(async)?(setUp|tearDown).*|(setup|teardown)(_.*)?|__\w+__", re.IGNORECASE)
_ASSERTING = re.compile(r"_?assert", re.IGNORECASE)
_RAISING = re.compile(r"raises|warns|assert(Raises|Warns|Logs|NoLogs)", re.IGNORECASE)
_RUNNERS = ("unittest.main", "pytest.main")
_CATCH_ALL = ("Exception", "BaseException", "AssertionError")
_NOT_RUN = ("skip", "expectedFailure", "xfail")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PARSER = threading.Lock()  # Python 3.11 counts the recursion of all threads together (gh-106905)

# Names that mean a library although tests do not import it: data sets leave the imports to the program.
_MODULES = {
    **{name: name for name in ("cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools")},
    **{name: name for name in ("heapq", "itertools", "json", "math", "numpy", "operator", "os", "pytest", "random")},
    **{name: name for name in ("re", "statistics", "string", "sys", "time", "types", "typing", "unittest")},
    "np": "numpy",
}
_HOMES = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque namedtuple ChainMap",
        "typing": "List Dict Tuple Set Optional Union Any Callable Iterable",
        "datetime": "datetime date time timedelta timezone",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "copy": "deepcopy",
        "math": " ".join(name for name in dir(math) if not name.startswith("_") and name != "e"),
        "itertools": "accumulate combinations permutations product zip_longest",
        "functools": "cmp_to_key partial reduce",
    }.items()
    for name in names.split()
}


def parse(source: str) -> ast.Module:
    """The tests' module; the part for `__name__ == "__main__"` is part of it, calls of test runners are not."""
    with _PARSER:
        tree = ast.parse(source, FILE)
    body = [inner for outer in tree.body for inner in (outer.body if _is_main(outer) else [outer])]  # type: ignore
    tree.body = [statement for statement in body if not _calls_a_runner(statement)]
    return tree


def _is_main(statement: ast.stmt) -> bool:
    test = statement.test if isinstance(statement, ast.If) else None
    return isinstance(test, ast.Compare) and sorted(ast.unparse(test).split(" == ")) == ["'__main__'", "__name__"]


def _calls_a_runner(statement: ast.stmt) -> bool:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return isinstance(statement, ast.Expr | ast.Raise) and any(ast.unparse(call.func) in _RUNNERS for call in calls)


def problem(sources: Sequence[str], *, entry_point: str, prelude: Iterable[str] = ()) -> str:
    """Why tests cannot judge any program, "" where they may: parts of them cannot run, or they check nothing.

    `entry_point`: the function that they test, "" if unknown. `prelude`: names that the tests have besides their own.
    """
    trees = [parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    words = Counter(_last_name(node) or (node.value if isinstance(node, ast.Constant) else "") for node in nodes)
    marker = Marker()
    for tree in trees:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        collected = {id(node) for body in (tree.body, *(each.body for each in classes)) for node in body}
        for node in ast.walk(tree):
            if isinstance(node, _DEFINITIONS):
                decorators = [_last_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
                if off := [name for name in decorators if name in _NOT_RUN]:
                    return f"{node.name} is marked {off[0]}: it judges nothing"
            if isinstance(node, _Function):
                if node.name == "load_tests":
                    return "they choose themselves what is run (load_tests)"
                run = words[node.name] or (id(node) in collected and _is_collected(node, node in tree.body))
                if not run and any(map(_is_check, ast.walk(node))):
                    return f"nothing calls {node.name}, which checks something (arguments of tests are not filled in)"
    if name := _class_of_the_program(sources, trees, {entry_point, *prelude}, entry_point):
        return f"they make objects of the program's class {name}, which Code does not judge: give tests of a function"
    for tree in trees:
        if dead := set(marker.visit(tree) and marker.lines) - _reachable(compile(tree, FILE, "exec")):
            line = min(marker.lines[mark] for mark in dead)
            return f"line {line} of the tests checks something, and can never run"
        marker.lines.clear()
    return "" if marker.scopes else "the tests check nothing"


def _reachable(code: types.CodeType) -> set[str]:
    """Marks of the assertions that the compiler has not left out: behind a return, in `if False`."""
    found = set[str]()
    for step in dis.get_instructions(code):
        if isinstance(step.argval, types.CodeType):
            found |= _reachable(step.argval)
        elif isinstance(step.argval, str) and step.argval.startswith(MARK):
            found.add(step.argval)
    return found


def _class_of_the_program(
    sources: Sequence[str], trees: Sequence[ast.Module], others: set[str], entry_point: str
) -> str:
    """A class that tests take from the program, by its name, beside the function that they test; "" for none."""
    used, bound = _used_and_bound(sources)
    called = {node.id for tree in trees for node in _callees(tree)} & (used - bound)
    theirs = {name for name in called if name not in _HOMES and not hasattr(builtins, name)} - others
    likely = sorted(name for name in theirs if re.fullmatch("[A-Z][A-Za-z0-9]*", name))
    return likely[0] if likely and (entry_point or len(theirs) > 1) else ""


def _is_collected(node: _Function, at_top: bool) -> bool:
    """Whether a function is run as a test: check(candidate), test functions without arguments, methods of tests."""
    given = node.args
    required = len(given.posonlyargs) + len(given.args) - len(given.defaults) + given.kw_defaults.count(None)
    is_test = node.name.startswith("test")
    if not at_top:
        return bool(_METHODS.fullmatch(node.name)) and not (is_test and required > 1)
    return node.name == "check" or (is_test and not required)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_check(node: ast.AST) -> bool:
    """Whether passing over a statement without an exception says something about what is tested."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant | ast.Tuple | ast.Lambda | ast.JoinedStr)
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(call, ast.Call) and bool(_ASSERTING.match(_last_name(call.func)))
    if isinstance(node, ast.With | ast.AsyncWith):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(_RAISING.match(_last_name(call.func)) for call in calls)
    return isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in (*node.body, *node.orelse))


def _must_raise(node: ast.Try) -> bool:
    """Whether the statements of a `try` fail where they do not raise."""
    inner = [part for statement in (*node.body, *node.orelse) for part in ast.walk(statement)]
    return any(
        isinstance(part, ast.Raise)
        or (isinstance(part, ast.Assert) and isinstance(part.test, ast.Constant) and not part.test.value)
        or (isinstance(part, ast.Call) and _last_name(part.func) == "fail")
        for part in inner
    )


class Marker(ast.NodeTransformer):
    """Makes every assertion mark, once it has passed, that it was executed.

    `scopes`: mark -> number and name of the function that it is in; `lines`: mark -> its line.
    """

    def __init__(self) -> None:
        self.scopes: dict[str, tuple[int, str]] = {}
        self.lines: dict[str, int] = {}
        self._functions = ["the module"]
        self._scope = 0
        self._own: set[str] = set()

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self._own |= {inner.name for inner in ast.walk(node) if isinstance(inner, _DEFINITIONS)}
        return ast.fix_missing_locations(self.generic_visit(node))  # type: ignore[return-value]

    def generic_visit(self, node: ast.AST) -> Any:
        outer = self._scope
        if isinstance(node, _Function):
            self._scope = len(self._functions)
            self._functions.append(node.name)
        super().generic_visit(node)
        self._scope = outer
        if isinstance(node, ast.Try) and _must_raise(node):
            for handler in node.handlers:
                names = [_last_name(part) for part in ast.walk(handler.type)] if handler.type else list(_CATCH_ALL)
                if not set(names) & set(_CATCH_ALL):
                    handler.body.append(self._mark(handler))
        call = node.value if isinstance(node, ast.Expr) else None
        marks_itself = isinstance(call, ast.Call) and _last_name(call.func) in self._own
        return [node, self._mark(node)] if _is_check(node) and not marks_itself else node

    def _mark(self, node: ast.AST) -> ast.Expr:
        mark = f"{MARK}{len(self.scopes)}"
        self.scopes[mark], self.lines[mark] = (self._scope, self._functions[self._scope]), node.lineno  # type: ignore[attr-defined]
        return ast.Expr(ast.Call(ast.Name(MARK, ast.Load()), [ast.Constant(mark)], []))


def is_mark(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _last_name(call.func) == MARK


def holds_marks(node: ast.AST) -> bool:
    """Whether a statement checks something itself, not in a function that it defines."""
    if isinstance(node, ast.Name):
        return node.id == MARK
    return not isinstance(node, _DEFINITIONS) and any(map(holds_marks, ast.iter_child_nodes(node)))


def calls(trees: Iterable[ast.Module], name: str) -> bool:
    """Whether a module calls a function outside of its definitions."""
    found = [node for tree in trees for s in tree.body if isinstance(s, ast.Expr) for node in ast.walk(s)]
    return any(isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id == name for c in found)


class Names:
    """Where the tests take the names from that they do not define: `program`, `library` (name -> value).

    Of builtins, the `prelude`, and libraries that data sets do not import, the tests get their own, whatever the
    program defines. One of them is the program's only where it is the `entry_point`, or the one name that tests without
    an entry point can be about; it is `tested` then, and known to the tests as `ALIAS` + name. `doubt`: names that
    could be it.
    """

    def __init__(
        self, sources: Sequence[str], trees: Sequence[ast.Module], entry_point: str, prelude: Mapping[str, Any]
    ) -> None:
        used, bound = _used_and_bound(sources)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        called = {node.id for tree in trees for node in _callees(tree)}
        attributes: dict[str, set[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                attributes.setdefault(node.value.id, set()).add(node.attr)
        free = {name for name in used - bound if not name.startswith("__")}
        found = {name: _of_a_library(name, attributes.get(name, set()), name in called) for name in sorted(free)}
        self.library = {name: value for name, value in found.items() if value is not None}
        self.library |= {name: prelude[name] for name in free & prelude.keys()}
        known = {name for name in free if hasattr(builtins, name)} | set(self.library)
        self.program = sorted(name for name in free - known if not _ASSERTING.match(name))
        self.tested, self.doubt = "", []
        check = any(isinstance(s, _Function) and s.name == "check" for tree in trees for s in tree.body)
        if entry_point in known:
            self.tested = entry_point
        elif not entry_point and not self.program and (not check or calls(trees, "check")):
            per_test = [known & set(map(_last_name, _callees(tree))) for tree in trees]
            per_test = [names for names in per_test if names]
            self.doubt = sorted(set.intersection(*per_test) or set.union(*per_test)) if per_test else []
            likely = [name for name in self.doubt if not hasattr(builtins, name)]
            if len(self.doubt) == 1 or len(likely) == 1:
                self.tested, self.doubt = (likely or self.doubt)[0], []
        self.library.pop(self.tested, None)


def _callees(tree: ast.Module) -> list[ast.Name]:
    return [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def _used_and_bound(sources: Iterable[str]) -> tuple[set[str], set[str]]:
    """Global names that sources use, and those that they define or import."""
    used, bound = set(), set()
    for source in sources:
        tables = [symtable.symtable(source, FILE, "exec")]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            for symbol in table.get_symbols():
                if symbol.is_global() and symbol.is_referenced():
                    used.add(symbol.get_name())
                if symbol.is_global() and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                    bound.add(symbol.get_name())
    return used, bound


def _of_a_library(name: str, attributes: set[str], called: bool) -> Any:
    """What a name means in tests that use these attributes of it; None: nothing that a library has."""
    homes = [_MODULES[name]] if name in _MODULES and attributes and not called else []
    for home in (*homes, _HOMES.get(name)):
        if home is not None:
            try:
                module = importlib.import_module(home)
            except ImportError:
                continue
            value = module if home in homes else getattr(module, name)
            if (callable(value) or not called) and all(hasattr(value, attribute) for attribute in attributes):
                return value
    return None


def prelude_names(source: str) -> dict[str, Any]:
    """What a prelude defines and imports, for the tests and for programs, by name."""
    names: dict[str, Any] = {}
    exec(compile(source, "prelude.py", "exec"), names)
    return {name: value for name, value in names.items() if not name.startswith("__")}


class Aliased(ast.NodeTransformer):
    """Lets a builtin's name mean the program's function, except in functions that get it as an argument."""

    def __init__(self, name: str, trees: Sequence[ast.Module]) -> None:
        self._name = name
        nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
        given = {_last_name(n.func) for n in nodes if name in map(_last_name, n.args) and isinstance(n.func, ast.Name)}
        self._receivers = given | (set() if calls(trees, "check") else {"check"})

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        return node if node.name in self._receivers else self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  as ast has it

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == self._name and isinstance(node.ctx, ast.Load):
            node.id = ALIAS + node.id
        return node
