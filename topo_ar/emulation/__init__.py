"""Several real hosts on one Linux machine."""
