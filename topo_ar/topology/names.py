"""Names in descriptions that give none."""

NODE = "node0"
"""The host of a description of one machine."""

FABRIC = "fabric"
"""The switch that stands for a network of which nothing is told."""
