"""Models with data that experiments train; nothing is downloaded."""
