"""Gradient compression between nodes: one codec a file behind one small protocol."""
