"""One figure a function, drawn from records only. Needs the extra ``plots``."""

from topo_ar.figures.accuracy import accuracy_over_bytes
from topo_ar.figures.bandwidth import busbw_over_size
from topo_ar.figures.bucket_cap import step_over_bucket_cap
from topo_ar.figures.codec_speedup import codec_speedup
from topo_ar.figures.graph import topology_graph
from topo_ar.figures.kernels import kernel_throughput
from topo_ar.figures.prediction import predicted_measured
from topo_ar.figures.published import published_share
from topo_ar.figures.ratio import comm_compute_ratio
from topo_ar.figures.scaling import scaling_efficiency
from topo_ar.figures.style import save, save_as
from topo_ar.figures.time_to_accuracy import quality_over_time
from topo_ar.figures.timeline import bucket_timeline
from topo_ar.figures.training import step_time, training_parity
from topo_ar.figures.wire_share import wire_share

__all__ = [
    "accuracy_over_bytes",
    "bucket_timeline",
    "busbw_over_size",
    "codec_speedup",
    "comm_compute_ratio",
    "kernel_throughput",
    "predicted_measured",
    "published_share",
    "quality_over_time",
    "save",
    "save_as",
    "scaling_efficiency",
    "step_over_bucket_cap",
    "step_time",
    "topology_graph",
    "training_parity",
    "wire_share",
]
