"""``python -m topo_ar`` is ``topo-ar``."""

from topo_ar.cli.main import main

main()
