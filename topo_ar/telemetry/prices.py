"""What a step and a run cost, from a price list that the user gives.

A price list is a TOML file, with every price for one hour or one gigabyte (10^9 bytes)::

    currency = "EUR"
    node_hour = 20.0          # one node, whatever is in it
    accelerator_hour = 2.5    # one accelerator, beside its node
    sent_gigabyte = 0.01      # what leaves a node

Prices that are left out are 0.
"""

from pathlib import Path

import msgspec

from topo_ar.errors import ConfigError

_HOUR = 3600.0
_GB = 1e9


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices in `currency`: of an hour of a node or an accelerator, and of a gigabyte sent."""

    currency: str
    node_hour: float = 0.0
    accelerator_hour: float = 0.0
    sent_gigabyte: float = 0.0

    def cost(
        self, seconds: float, nodes: int, accelerators: int, nbytes_between: float = 0.0
    ) -> float:
        """Return what a step, or any other time, costs.

        Parameters
        ----------
        seconds : float
            How long it takes.
        nodes, accelerators : int
            Of the whole job.
        nbytes_between : float
            Bytes that leave all nodes together meanwhile.
        """
        hourly = nodes * self.node_hour + accelerators * self.accelerator_hour
        return seconds / _HOUR * hourly + nbytes_between / _GB * self.sent_gigabyte

    def cost_of_run(
        self,
        steps: int,
        step_seconds: float,
        nodes: int,
        accelerators: int,
        step_nbytes_between: float = 0.0,
        other_seconds: float = 0.0,
    ) -> float:
        """Return what a run costs: its steps, and `other_seconds` of start and evaluation."""
        each = self.cost(step_seconds, nodes, accelerators, step_nbytes_between)
        return steps * each + self.cost(other_seconds, nodes, accelerators)


def read_prices(path: Path) -> PriceList:
    """Return the price list in a TOML file.

    Raises
    ------
    ConfigError
        If the file cannot be read or is no price list; the message names the field.
    """
    try:
        prices = msgspec.toml.decode(path.read_bytes(), type=PriceList)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no price list: {error}; write currency and prices such as "
            "accelerator_hour = 2.5"
        ) from None
    for name in ("node_hour", "accelerator_hour", "sent_gigabyte"):
        if not 0 <= getattr(prices, name) < float("inf"):
            raise ConfigError(f"{path}: {name} is {getattr(prices, name)}; it must be 0 or more")
    if not any((prices.node_hour, prices.accelerator_hour, prices.sent_gigabyte)):
        raise ConfigError(
            f"{path} holds no price; give node_hour, accelerator_hour or sent_gigabyte"
        )
    return prices
