"""Share of a flat ring and of the exact bound that published NCCL peaks reach.

python plots/published.py RESULTS/published.jsonl -o published.png
"""

from _command import plot, records

from topo_ar.figures import published_share

plot(__doc__, records, published_share)
