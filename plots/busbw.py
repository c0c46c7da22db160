"""Bus bandwidth over message size, from the rows of ``topo-ar bench --json``.

python plots/busbw.py RESULTS.jsonl -o busbw.png
"""

from _command import plot, records

from topo_ar.figures import busbw_over_size

plot(__doc__, records, busbw_over_size)
