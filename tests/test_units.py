import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import ConfigError
from topo_ar.units import format_rate, format_seconds, format_size, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("65536", 65536),
        ("64K", 65536),
        ("25M", 25 << 20),
        ("1g", 1 << 30),
        ("25MB", 25_000_000),
        ("25MiB", 25 << 20),
        ("1.5K", 1536),
        ("100 kB", 100_000),
    ],
)
def test_sizes_are_binary_letters_and_decimal_names(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-1", "5T", "1.5", "1e3", "K"])
def test_a_bad_size_names_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match="size|whole number"):
        parse_size(text)


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 125e6), ("2.5gbit", 312.5e6), ("8bit", 1.0)])
def test_rates_are_bytes_per_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0gbit", "1", "1gb", "fast"])
def test_a_bad_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="link rate"):
        parse_rate(text)


@given(st.integers(min_value=1, max_value=1 << 20))
def test_exact_binary_sizes_survive_a_round_trip(count: int) -> None:
    assert parse_size(format_size(count << 10).replace(" ", "")) == count << 10


def test_formats() -> None:
    assert format_size(25_000_000) == "25 MB"
    assert format_rate(125e6) == "125 MB/s"
    assert format_seconds(0.209) == "209 ms"
