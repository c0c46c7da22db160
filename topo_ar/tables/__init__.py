"""One table a function, from records or from a computation; `catalogue` knows all of them."""
