"""What codecs without a state of their own share."""

import torch

from topo_ar.compression.protocol import Group, Layout
from topo_ar.planning.codecs import Codec


class Stateless:
    """A codec that remembers nothing between steps."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def commit(self, layout: Layout) -> None:
        """Do nothing: there is no state."""

    def share(self, node: Group) -> None:
        """Do nothing: there is no state."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Do nothing: there is no state."""
