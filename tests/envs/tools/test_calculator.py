"""The calculator: exact, and bounded whatever it is given."""

import pytest

from jaxrl.envs.tools.calculator import MAX_BITS, MAX_CHARS, MAX_DEPTH, calculate
from jaxrl.envs.tools.tool import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("8 + 3 - 1 + 8", "18"),
        ("0 - 4", "-4"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ** 3 ** 2", "512"),
        ("2 ** -2", "0.25"),
        ("6 / 2", "3"),
        ("7 / 2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("0.1 * 10 ** 20 - 10 ** 19", "0"),
        ("1.50 * 2", "3"),
        (".5 + 1.", "1.5"),
        ("1 / 3", "0.333333333333"),
        ("2 / 3 * 3", "2"),
        ("12345678901234567890 * 10", "123456789012345678900"),
        ("10 ** 20 / 3", "33333333333300000000"),
        (" 1\n+\t1 ", "2"),
        ("0 ** 0", "1"),
        ("1 ** 99999999999", "1"),
        ("-0.5", "-0.5"),
    ],
)
def test_an_expression_is_worked_out_exactly(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "an exponent must be a whole number"),
        ("", "not an arithmetic expression"),
        ("(1", "not an arithmetic expression"),
        ("1 2", "not an arithmetic expression"),
        ("1()", "not an arithmetic expression"),
        ("...", "not an arithmetic expression"),
        ("()", "not an arithmetic expression"),
        ("1, 2", "not an arithmetic expression"),
        ("__import__('os')", "not an arithmetic expression"),
        ("1 if 1 else 2", "not an arithmetic expression"),
        ("~1", "not an arithmetic expression"),
        ("1 << 9", "not an arithmetic expression"),
        ("\u0661 + 1", "not an arithmetic expression"),
        ("9 ** 9 ** 9", "a number in it is too large"),
        ("9 ** 9 ** 9 ** 9", "a number in it is too large"),
        ("(9 ** 999) ** 4", "a number in it is too large"),
        ("((1 / 7) ** 400) ** 4", "a number in it is too large"),
        ("2 ** 4096", "a number in it is too large"),
        ("(2 ** 4000) * (2 ** 4000)", "a number in it is too large"),
        ("0.5 ** 99999", "a number in it is too large"),
        ("1" * (MAX_CHARS + 1), f"longer than {MAX_CHARS} characters"),
        ("-" * (MAX_DEPTH + 1) + "1", f"more than {MAX_DEPTH} operations within one another"),
    ],
)
def test_anything_else_is_refused_in_words(expression: str, words: str) -> None:
    with pytest.raises(ToolError) as error:
        calculate(expression)
    assert str(error.value) == words


def test_a_sum_of_two_hundred_terms_is_read_and_one_of_201_signs_is_not() -> None:
    assert calculate("+".join(["1"] * 200)) == "200"
    assert calculate("-" * MAX_DEPTH + "1") == "1"


def test_the_largest_number_is_written_out() -> None:
    assert calculate("2 ** 4095") == str(2**4095) and (2**4095).bit_length() == MAX_BITS
