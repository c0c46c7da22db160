"""Which all-reduce to run, what it costs, and what nothing can beat."""
