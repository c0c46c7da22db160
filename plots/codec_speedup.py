"""Speed-up of training steps by codec and NIC rate, from ``05_compression.py --ddp``.

python plots/codec_speedup.py RESULTS/compression_ddp.jsonl -o compression_ddp.png
"""

from _command import plot, records

from topo_ar.figures import codec_speedup

plot(__doc__, records, codec_speedup)
