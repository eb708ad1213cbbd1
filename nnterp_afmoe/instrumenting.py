"""Make a few operations of a forward addressable, and leave the others as they are.

nnsight's ``.source`` puts a handoff around every call and every assignment of a forward, which an
idle model pays for too. The table names one or two operations in each; only those get the handoff,
under nnsight's own labels, so that a location means the same either way. A user who asks for
``.source`` on the module gets nnsight's full instrumentation in place of this one.
"""

from __future__ import annotations

import ast
import functools
from types import CodeType

from nnsight import Envoy
from nnsight.intervention.source import (
    BIND,
    OP,
    Instrument,
    bind,
    decorator_chain,
    function_like,
    install_controller,
    make_op,
    rewrap,
    source_tree,
)

__all__ = ["instrument_operations"]


class Chosen(Instrument):
    """nnsight's rewriting, undone for every operation but the ones wanted."""

    def __init__(self, wanted: frozenset[str]) -> None:
        super().__init__()
        self.wanted = wanted

    def wrap(self, name: str, fn: ast.expr, args: list, keywords: list, node: ast.AST) -> ast.expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        operation = super().wrap(name, fn, args, keywords, node)
        if self.names[-1] in self.wanted:
            return operation
        if isinstance(fn, ast.Name) and fn.id == BIND:
            return args[0]
        return ast.copy_location(ast.Call(func=fn, args=args, keywords=keywords), node)


def instrument_operations(envoy: Envoy, labels: frozenset[str]) -> None:
    """Give the operations ``labels`` of the envoy's forward their handoffs, as long as nnsight has not all of them."""
    state = install_controller(envoy)
    if state.sourced:
        return
    inner, chain = decorator_chain(state.original)
    code = rewritten(inner.__code__, labels)
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars) or None
    op = make_op(lambda: state.active()[:2])
    state.body = rewrap(chain, function_like(inner, code, closure, **{OP: op, BIND: bind}))


@functools.cache
def rewritten(code: CodeType, labels: frozenset[str]) -> CodeType:
    """``code``, compiled again from its source with a handoff around each of ``labels``."""
    tree, start, _ = source_tree(code)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    Chosen(labels).visit(function)
    # Within a function that has its free names as parameters, they compile as free names again.
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function]
    ast.increment_lineno(function, start - 1)
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    return nested(nested(compile(module, code.co_filename, "exec"), "outer"), code.co_name)


def nested(code: CodeType, name: str) -> CodeType:
    """The code of the function ``name`` that ``code`` defines."""
    return next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
