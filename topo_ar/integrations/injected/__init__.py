"""A folder for ``PYTHONPATH``: Python imports its ``sitecustomize`` before it runs a script."""
