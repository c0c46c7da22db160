"""Accuracy over the bytes on the wire, from the trainings of ``05_compression.py --accuracy``.

python plots/accuracy.py RESULTS/compression_accuracy.jsonl -o compression_accuracy.png
"""

from _command import plot, records

from topo_ar.figures import accuracy_over_bytes

plot(__doc__, records, accuracy_over_bytes)
