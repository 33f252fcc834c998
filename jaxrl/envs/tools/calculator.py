"""The tool `calculator`: an arithmetic expression, worked out exactly and within hard bounds.

In: a text of digits, decimal points, + - * / // % ** and parentheses. Out: the number as a text, or words about what is wrong.
Whatever the policy writes, it takes milliseconds and no memory to speak of: length, depth and the size of every number are bounded.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from typing import Any

from jaxrl.envs.tools.tool import Tool, ToolError

MAX_CHARS = 400
MAX_DEPTH = 200
"""Operations within one another; a sum of n terms has n - 1."""
MAX_BITS = 4096
"""Of a numerator or a denominator, after every operation: more than a thousand digits."""
EXACT_DIGITS = 50
"""A number with at most so many digits is written as it is; one that has more after its point, or never ends, is rounded."""
ROUNDED_DIGITS = 12

_ALPHABET = re.compile(r"[0-9.+\-*/%() ]*")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(name: str = "calculator", argument: str = "expression") -> Tool:
    """Return the calculator as a tool of this name, with one argument of that."""

    async def call(arguments: dict[str, Any]) -> str:
        return calculate(arguments[argument])

    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return Tool(name, call, "Evaluates an arithmetic expression.", parameters, deadline_s=None)


def calculate(expression: str) -> str:
    """Return the value of an expression: a whole number without a point, any other with as many decimals as it has.

    Raises:
      ToolError: it is no expression, has no value, or goes beyond a bound.

    Example:
      >>> calculate("8 + 3 - 1"), calculate("0.1 + 0.2"), calculate("7 // 2 * 1.5"), calculate("1 / 3"), calculate("6 / 2")
      ('10', '0.3', '4.5', '0.333333333333', '3')
    """
    text = " ".join(expression.split()) if len(expression) <= MAX_CHARS else expression
    if len(text) > MAX_CHARS:
        raise ToolError(f"longer than {MAX_CHARS} characters")
    if not _ALPHABET.fullmatch(text):
        raise _unreadable()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable() from None
    try:
        return _written(_value(tree.body, text, 0))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ToolError(f"more than {MAX_DEPTH} operations within one another")
    match node:
        case ast.Constant(value=int() | float()):
            # The digits as they stand there: a float would round them.
            return Fraction(text[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _value(node.operand, text, depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(op=ast.Pow()):
            value = _power(_value(node.left, text, depth + 1), _value(node.right, text, depth + 1))
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            value = Fraction(_OPERATIONS[type(node.op)](_value(node.left, text, depth + 1), _value(node.right, text, depth + 1)))
        case _:
            raise _unreadable()
    if _bits(value) > MAX_BITS:
        raise _too_large()
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent must be a whole number")
    if abs(exponent) * (_bits(base) - 1) > MAX_BITS:  # found before it is worked out
        raise _too_large()
    return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _unreadable() -> ToolError:
    # Short, like every message here: a small model's window is short too.
    return ToolError("not an arithmetic expression")


def _too_large() -> ToolError:
    return ToolError("a number in it is too large")


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        number = _divided(value, Context(prec=EXACT_DIGITS, traps=[Inexact]))
    except Inexact:
        number = _divided(value, Context(prec=ROUNDED_DIGITS))
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _divided(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))
