"""Foreign topology descriptions, one format a file."""
