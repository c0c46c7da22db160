"""Throughput of compression kernels beside torch's, from ``05_compression.py --kernels``.

python plots/kernels.py RESULTS/compression_kernels.jsonl -o compression_kernels.png
"""

from _command import plot, records

from topo_ar.figures import kernel_throughput

plot(__doc__, records, kernel_throughput)
