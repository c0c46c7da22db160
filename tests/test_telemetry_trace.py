import json
from dataclasses import replace

import pytest

from topo_ar.errors import ConfigError
from topo_ar.telemetry.trace import Span, read_trace, write_trace


def span(rank, lane, begin, end, **args):
    return Span("send", rank, lane, begin, end, args)


SPANS = [
    span(1, "inter_exchange", 10.25, 10.5, chunk=0),
    span(0, "intra_reduce_scatter", 10.0, 10.125, chunk=0),
    span(0, "inter_exchange", 10.125, 10.5, chunk=1),
]


def test_the_file_is_a_trace_event_document(tmp_path):
    write_trace(SPANS, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] == "ms"
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        (0, 0, 0.0, 125_000.0),
        (0, 1, 125_000.0, 375_000.0),
        (1, 1, 250_000.0, 250_000.0),
    ]
    assert complete[1]["args"] == {"chunk": 1}
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"].endswith("_name")
    }
    assert names == {
        ("process_name", 0, 0): "rank 0",
        ("thread_name", 0, 0): "intra_reduce_scatter",
        ("thread_name", 0, 1): "inter_exchange",
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 1): "inter_exchange",
    }


def test_spans_come_back_from_the_file_counted_from_the_first(tmp_path):
    write_trace(SPANS, tmp_path / "trace.json")
    expected = [
        replace(s, begin_seconds=s.begin_seconds - 10, end_seconds=s.end_seconds - 10)
        for s in (SPANS[1], SPANS[2], SPANS[0])
    ]
    assert read_trace(tmp_path / "trace.json") == expected


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([], "at least one span"),
        ([span(0, "a", 2.0, 1.0)], "ends at 1.0 s, before it begins at 2.0 s"),
    ],
)
def test_bad_spans(tmp_path, spans, said):
    with pytest.raises(ConfigError, match=said):
        write_trace(spans, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [{}]}'])
def test_a_file_that_is_no_trace(tmp_path, content):
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ConfigError, match="not a trace of topo-ar"):
        read_trace(tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="cannot read a trace"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write a trace"):
        write_trace(SPANS, tmp_path / "no" / "folder.json")
