"""Bucket traces as files."""

import pytest

from topo_ar.errors import ConfigError
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace, StepTrace, read

CALL = BucketCall(0, 6, "float32", ("weight",), 0.01, 0.02, ((2, 3),))


def test_a_trace_comes_back_as_it_was_written(tmp_path):
    trace = BucketTrace(4, (StepTrace(7, [CALL]),))
    trace.write(tmp_path / "trace.json")
    assert read(tmp_path / "trace.json") == trace


def test_a_trace_without_shapes_is_read(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(
        '{"world_size": 2, "schema": 1, "steps": [{"step": 0, "buckets": [{"index": 0, "numel": 3,'
        ' "dtype": "float32", "parameters": ["b"], "call_seconds": 0.5}]}]}'
    )
    (call,) = read(path).steps[0].buckets
    assert call.shapes == ()
    assert call.done_seconds is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{", "is not a bucket trace"),
        ('{"world_size": 2}', "required field `steps`"),
        ('{"world_size": 2, "steps": [], "schema": 9}', "schema 9; this version reads 1"),
        ('{"world_size": 2, "steps": []}', "holds no bucket"),
        ('{"world_size": 2, "steps": [{"step": 0, "buckets": []}]}', "holds no bucket"),
    ],
)
def test_what_is_no_trace_is_explained(tmp_path, text, message):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
