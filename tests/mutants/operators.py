"""Small changes to a function: what a mutant does. They are found by what they change, so that the function can move."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

NEIGHBORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


def _changed(node: Any, **fields: Any) -> Any:
    found = copy.copy(node)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def other(node: Any) -> Any:
    """The comparison, calculation, function or number that is easily taken for it."""
    match node:
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right)):
            return ast.BinOp(left, ast.FloorDiv(), right)  # rounded down, not up
        case ast.Compare(ops=[operator]) if neighbor := NEIGHBORS.get(type(operator)):
            return _changed(node, ops=[neighbor()])
        case ast.BinOp() | ast.AugAssign() if neighbor := NEIGHBORS.get(type(node.op)):
            return _changed(node, op=neighbor())
        case ast.Call(func=ast.Name(name)) if name in FUNCTIONS:
            return _changed(node, func=ast.Name(FUNCTIONS[name]))
        case ast.Call(func=ast.Attribute(attr=name)) if name in FUNCTIONS:
            return _changed(node, func=_changed(node.func, attr=FUNCTIONS[name]))
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(value + 1)
    return None


def drop(node: Any) -> Any:
    """Without a statement."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return ast.Pass() if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)) and not is_text else None


def first(node: Any) -> Any:
    """Without the last operand, element, keyword argument, condition or alternative."""
    match node:
        case ast.BinOp():
            return node.left
        case ast.BoolOp():
            return _changed(node, values=node.values[:-1])
        case ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) if node.elts:
            return _changed(node, elts=node.elts[:-1])
        case ast.IfExp():
            return node.body
        case ast.UnaryOp(ast.Not() | ast.USub()):
            return node.operand
        case ast.Call() if node.keywords:
            return _changed(node, keywords=node.keywords[:-1])
    return None


def last(node: Any) -> Any:
    """Without the first operand, condition or alternative, or without the call of a function of one argument."""
    match node:
        case ast.BinOp():
            return node.right
        case ast.BoolOp():
            return _changed(node, values=node.values[1:])
        case ast.IfExp():
            return node.orelse
        case ast.Call(args=[only], keywords=[]):
            return only
    return None


def _condition(value: bool) -> Callable[[Any], Any]:
    def changed(node: Any) -> Any:
        """With a condition that always has this value."""
        match node:
            case ast.If() | ast.While():
                return _changed(node, test=ast.Constant(value))
            case ast.comprehension() if node.ifs:
                return _changed(node, ifs=[ast.Constant(value)])
        return None

    return changed


def unguard(node: Any) -> Any:
    """The body of a ``try`` or ``with``, without what guards it."""
    return node.body if isinstance(node, (ast.Try, ast.With)) else None


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "other": other,
    "drop": drop,
    "first": first,
    "last": last,
    "always": _condition(True),
    "never": _condition(False),
    "unguard": unguard,
}


def functions(tree: ast.AST, path: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions of a module and their names, with those of the classes and functions around them."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(child, ast.FunctionDef):
                yield f"{path}{child.name}", child
            yield from functions(child, f"{path}{child.name}.")
        else:
            yield from functions(child, path)


def changes(function: ast.AST) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """All changes of a function: the operator, the first line of what it changes, and what makes the change in the tree."""
    for name, value in ast.iter_fields(function):
        if name in ("decorator_list", "annotation", "returns"):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.AST):
                for operator, change in OPERATORS.items():
                    if (changed := change(node)) is not None:
                        made = changed if isinstance(changed, list) else [changed]
                        yield operator, ast.unparse(node).strip().partition("\n")[0], _put(function, name, index, made)
                yield from changes(node)


def _put(parent: ast.AST, name: str, index: int, changed: list[Any]) -> Callable[[], None]:
    def put() -> None:
        value = getattr(parent, name)
        if isinstance(value, list):
            value[index : index + 1] = changed
        else:
            setattr(parent, name, changed[0])

    return put
