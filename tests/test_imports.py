"""The layout as the README draws it: imports point down and never in a circle."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "jaxhal"
# A room may import rooms of lower rank; rooms of one rank do not know each other.
RANK = {
    "types": 0,
    "files": 0,
    "markdown": 0,
    "showing": -1,
    "stopping": 0,
    "devices": 0,
    "progress": 0,
    "texts": 0,
    "sealing": 0.5,
    "models": 1,
    "partial": 1,
    "features": 1,
    "datasets": 1,
    "evaluation": 1,
    "hosts": 1,
    "limits": 2,
    "rows": 2,
    "plotting": 2,
    "classifiers": 2,
    "cards": 2,
    "endpoint": 2,
    "encoding": 2,
    "lrp": 2,
    "capture": 3,
    "sources": 3,
    "judges": 3,
    "generation": 4,
    "store": 4,
    "entailment": 4,
    "spans": 4,
    "samples": 5,
    "tuning": 5,
    "detectors": 6,
    "report": 6,
    "fitting": 7,
    "views": 7,
    "summary": 7,
    "console": 7,
    "inputs": 8,
    "saving": 8,
    "judging": 8,
    "shipped": 9,
    "detection": 10,
    "guided": 11,
    "scoring": 11,
    "streaming": 11,
    "experiments": 12,
    "watchdog": 13,
    "bench": 14,
    "cli_watchdog": 14,
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
