"""Flow-level simulation with contention: all-reduces and whole training steps on any topology."""
