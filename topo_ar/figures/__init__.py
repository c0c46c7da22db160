"""One figure a function, drawn from records only. Needs the extra ``plots``."""

from topo_ar.figures.accuracy import accuracy_over_bytes
from topo_ar.figures.bandwidth import busbw_over_size
from topo_ar.figures.codec_speedup import codec_speedup
from topo_ar.figures.graph import topology_graph
from topo_ar.figures.kernels import kernel_throughput
from topo_ar.figures.prediction import predicted_measured
from topo_ar.figures.published import published_share
from topo_ar.figures.style import save, save_as
from topo_ar.figures.timeline import bucket_timeline
from topo_ar.figures.training import step_time, training_parity
from topo_ar.figures.wire_share import wire_share

__all__ = [
    "accuracy_over_bytes",
    "bucket_timeline",
    "busbw_over_size",
    "codec_speedup",
    "kernel_throughput",
    "predicted_measured",
    "published_share",
    "save",
    "save_as",
    "step_time",
    "topology_graph",
    "training_parity",
    "wire_share",
]
