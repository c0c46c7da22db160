"""The graph of a topology, from its JSON.

python plots/topology.py TOPOLOGY.json -o topology.png
"""

from _command import one_json, plot

from topo_ar.figures import topology_graph

plot(__doc__, one_json, topology_graph)
