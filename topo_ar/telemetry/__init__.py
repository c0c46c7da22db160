"""Result records, metrics and traces."""
