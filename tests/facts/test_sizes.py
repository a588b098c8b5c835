import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.facts.sizes import BadSize, check_budget, parse_budget, parse_size, step_budget
from lowtide.units import format_size, round_up_size, size_and_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("500 MiB", 500 * 2**20),
        (" 1.5 kib ", 1536),
        (".5MB", 500_000),
        ("123", 123),
        ("7b", 7),
        ("2TiB", 2 * 2**40),
        ("8G", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("8gb", 8 * 10**9),
        ("8 GiB", 8 * 2**30),
        ("500M", 500 * 2**20),
        (42, 42),
    ],
)
def test_sizes_that_can_be_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 apples", "-1GiB", "1e9", "0", 0, -5, True, "0.4b", "60%", None]
)
def test_sizes_that_cannot_be_read_are_named(text):
    with pytest.raises(BadSize) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, LowtideError)


def test_a_percentage_is_a_share_of_the_whole():
    assert parse_budget("60%", whole=1000) == 600
    assert parse_budget(" 12.5 % ", whole=1000) == 125
    assert parse_budget("1KiB", whole=10) == 1024


@pytest.mark.parametrize("text", ["0%", "%", "60 percent"])
def test_percentages_that_cannot_be_read(text):
    with pytest.raises(BadSize):
        parse_budget(text, whole=1000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (5 * 2**40, "5.00 TiB")],
)
def test_sizes_for_people(nbytes, text):
    assert format_size(nbytes) == text


@given(st.integers(min_value=1, max_value=2**45))
def test_a_printed_size_reads_back_to_about_the_same(nbytes):
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.06)


@given(st.integers(min_value=1))
def test_whole_bytes_read_back_exactly(nbytes):
    assert parse_size(str(nbytes)) == parse_size(nbytes) == nbytes


def test_a_size_with_its_bytes():
    assert size_and_bytes(2040109465) == "1.9 GiB (2040109465 bytes)"
    assert size_and_bytes(100) == "100 bytes"


@given(st.integers(1, 2**46))
def test_a_size_rounded_up_can_be_typed_and_is_little_more(nbytes):
    rounded = parse_size(round_up_size(nbytes))
    assert nbytes <= rounded <= nbytes * 1.01 and len(round_up_size(nbytes)) < 10


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (60, "did you mean '60%' of the step's peak, or '60GiB'?"),
        (" 8 ", "did you mean '8%' of the step's peak, or '8GiB'?"),
        ("500", "did you mean '500MiB', or '500GiB'?"),
        ("20 reserved", "did you mean '20%' of the step's peak, or '20GiB'?"),
    ],
)
def test_a_number_that_lacks_its_unit_is_asked_about(text, asked):
    with pytest.raises(BadSize, match="too small for any step") as caught:
        check_budget(text)
    assert str(caught.value).endswith(asked)


@pytest.mark.parametrize(("text", "nbytes"), [("60B", 60), (1024, 1024), ("60%", 600), ("2e", None)])
def test_budgets_with_a_unit_or_large_enough_are_taken_as_they_are(text, nbytes):
    if nbytes is None:
        with pytest.raises(BadSize, match="cannot read"):
            step_budget(text, whole=1000)
    else:
        assert step_budget(text, whole=1000) == nbytes
