"""Measurements that others published; ``published/SOURCES.md`` says where they are from."""
