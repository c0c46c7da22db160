"""Topology-aware hierarchical all-reduce for data-parallel training."""
