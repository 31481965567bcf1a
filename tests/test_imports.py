"""The layout as the site draws it: imports point down and never in a circle."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "jaxhal"
# A room may import rooms of lower rank; rooms of one rank do not know each other.
RANK = {
    "io": 0,
    "types": 1,
    "texts": 1,
    "evaluation": 2,
    "features": 2,
    "models": 3,
    "plotting": 3,
    "datasets": 4,
    "classifiers": 4,
    "lrp": 4,
    "capture": 5,
    "generation": 6,
    "llm": 7,
    "reading": 8,
    "detectors": 9,
    "tuning": 9,
    "reporting": 10,
    "scoring": 11,
    "experiments": 12,
    "watchdog": 12,
    "serve": 13,
    "bench": 14,
    "cli": 15,
    "__main__": 16,
}


def _room(module: str) -> str:
    return module.split(".")[1]


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if name != "jaxhal.__init__":
            yield name.removesuffix(".__init__"), ast.parse(path.read_text("utf-8"))


# What the package has at its top -> the module that it comes from.
TOP = {
    alias.name: f"jaxhal.{node.module}"
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}


def _imports(tree: ast.AST):
    """Modules of this package named by imports anywhere, inside functions too.

    What is taken of ``jaxhal`` itself is of the module that it comes from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, names = node.value.id, [node.attr]
        else:
            continue
        if module == "jaxhal" or module.startswith("jaxhal."):
            yield from (_named(module, name) for name in names if name[:2] != "__")


def _named(module: str, name: str) -> str:
    inner = f"{module}.{name}"
    path = PACKAGE.parent.joinpath(*inner.split("."))
    if path.with_suffix(".py").is_file() or path.is_dir():
        return inner
    return TOP[name] if module == "jaxhal" else module


def test_what_is_taken_of_the_package_has_a_place():
    code = "from jaxhal import fit, models; jaxhal.score(jaxhal.__version__)"
    assert {*_imports(ast.parse(code))} == {TOP["fit"], "jaxhal.models", TOP["score"]}


def test_imports_point_down():
    upward = []
    for name, tree in _modules():
        for imported in _imports(tree):
            inside = _room(imported) == _room(name)
            assert _room(imported) in RANK, f"{name} imports unknown {imported}"
            if not inside and RANK[_room(imported)] >= RANK[_room(name)]:
                upward.append(f"{name} -> {imported}")
    assert not upward


def test_no_circle_inside_a_room():
    edges = {
        name: {i for i in _imports(tree) if _room(i) == _room(name) and i != name}
        for name, tree in _modules()
    }
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]):
        assert state.get(name) != 1, f"circle: {' -> '.join((*path, name))}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for other in edges.get(name, ()):
            visit(other, (*path, name))
        state[name] = 2

    for name in edges:
        visit(name, ())
    assert len(edges) > 20


def test_every_room_has_a_rank():
    rooms = {_room(name) for name, _ in _modules()}
    assert rooms == set(RANK)
