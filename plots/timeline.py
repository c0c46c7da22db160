"""The stages of one bucket on every rank over time, from a trace (which Perfetto opens too).

python plots/timeline.py TRACE.json -o timeline.png
"""

from _command import plot

from topo_ar.figures import bucket_timeline
from topo_ar.telemetry.trace import Span, read_trace


def spans(files: list[str]) -> list[Span]:
    """Return the spans of all traces."""
    return [span for file in files for span in read_trace(file)]


plot(__doc__, spans, bucket_timeline)
