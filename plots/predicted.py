"""Predicted beside measured times, from the rows of ``topo-ar bench --json``.

python plots/predicted.py RESULTS.jsonl -o predicted.png
"""

from _command import plot, records

from topo_ar.figures import predicted_measured

plot(__doc__, records, predicted_measured)
