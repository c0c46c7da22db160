"""One figure a function, from result files only."""
