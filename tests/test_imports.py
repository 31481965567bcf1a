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


def _imports(tree: ast.AST):
    """Modules of this package named by imports anywhere, inside functions too."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module.split(".")[0] != "jaxhal":
            continue
        for alias in node.names:
            inner = f"{module}.{alias.name}"
            path = PACKAGE.parent.joinpath(*inner.split("."))
            is_module = path.with_suffix(".py").is_file() or path.is_dir()
            if is_module or module != "jaxhal":
                yield inner if is_module else module


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
