"""The topo-ar command, one file a verb."""
