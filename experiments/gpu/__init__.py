"""The checks of `gpu_checks`, each a function that runs on the ranks of its own processes."""
