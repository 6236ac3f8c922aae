"""A constant has one value in the package: two modules do not call two numbers by one name.

Who reads `MANY_RANKS` in one module and knows it from another would think of the wrong number. Names are compared
without a leading underscore. Words and tables are not compared: what they say is seen where they stand.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.unit.test_package import TREES

# Names that modules of one kind have, each with its own value.
INTERFACES = {"VERSION": "of the format of the files that the module writes"}
# Names that still have several values. The list only shrinks: who mends one removes it.
_SEVERAL_VALUES = """
    ANSWER_S HEAD_DIM MAX_GROUPS MAX_RANKS POLL_S ROUNDING
    RTOL RTOL_HALF STEPS STEP_TABLE TAU TIMES WIDTH
"""
SEVERAL_VALUES = frozenset(_SEVERAL_VALUES.split())


def test_a_number_has_a_name_of_its_own() -> None:
    several = _several_values()
    found = {name: where for name, where in several.items() if name not in SEVERAL_VALUES}
    assert found == {}, "give each a name that says what it bounds, or let both read one constant"


def test_the_list_of_constants_with_several_values_shrinks() -> None:
    assert SEVERAL_VALUES - _several_values().keys() == set(), "remove these from SEVERAL_VALUES"


def _several_values() -> dict[str, dict[str, str]]:
    """By name, the modules and numbers of constants that have unlike numbers."""
    numbers: dict[str, dict[str, str]] = defaultdict(dict)
    for module, tree in TREES.items():
        for name, value in _constants(tree):
            if _is_number(value):
                numbers[name.lstrip("_")][module] = ast.unparse(value)
    return {name: where for name, where in numbers.items() if len(set(where.values())) > 1 and name not in INTERFACES}


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            yield from _pairs(target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of an assignment, taken apart: ``A, B = 1, 2``."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(name, part)
    elif isinstance(target, ast.Name) and target.id.isupper():
        yield target.id, value


def _is_number(value: ast.expr) -> bool:
    """Numbers, and sums, products and tuples of them; `torch.finfo` counts as one."""
    match value:
        case ast.Constant(value=int() | float()):
            return not isinstance(value.value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Tuple(elts=parts) if parts:
            return all(map(_is_number, parts))
        case ast.Attribute():
            return ast.unparse(value).startswith("torch.finfo")
    return False
