"""How bytes move: shared memory inside a node, TCP between nodes, c10d for the rest."""
