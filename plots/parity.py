"""Losses of a training with and without the hook, and how far apart they are.

python plots/parity.py TRAINING.jsonl -o parity.png
"""

from _command import plot, records

from topo_ar.figures import training_parity

plot(__doc__, records, training_parity)
