"""Chakra execution traces: a schedule as one graph of sends, receives and sums for each rank.

ASTRA-sim takes such files as a custom collective: its system description names their folder and
common name under ``all-reduce-implementation-custom``. The messages are those of Chakra's
``et_def.proto``, version 0.0.4; only the fields that are written are declared here.
"""

from collections.abc import Iterator
from functools import cache
from io import BytesIO
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.planning.export.transfers import Transfer, transfers
from topo_ar.planning.schedule import Schedule

VERSION = "0.0.4"
COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE = 4, 5, 6


def to_traces(schedule: Schedule) -> list[bytes]:
    """Return the content of one ``.et`` file for each rank.

    A send carries ``comm_size`` in bytes, ``comm_src``, ``comm_dst`` and ``comm_tag`` (the number
    of the message); so does its receive, which a sum of ``num_ops`` additions follows where the
    message is added.

    Parameters
    ----------
    schedule : Schedule
        Without whole all-reduces.

    Raises
    ------
    ConfigError
        If protobuf is not installed.
    PlanError
        As for `transfers`.
    """
    messages = _messages()
    from google.protobuf.proto import serialize_length_prefixed

    found = transfers(schedule)
    traces = []
    for rank in range(schedule.world_size):
        file = BytesIO()
        serialize_length_prefixed(messages["GlobalMetadata"](version=VERSION), file)
        for node in _nodes(messages, found, rank, schedule.itemsize):
            serialize_length_prefixed(node, file)
        traces.append(file.getvalue())
    return traces


def read_trace(content: bytes) -> tuple[str, list[Any]]:
    """Return the version and the nodes of a trace, as protobuf messages.

    Raises
    ------
    ConfigError
        If protobuf is not installed, or `content` is cut off or no trace.
    """
    messages = _messages()
    from google.protobuf.message import DecodeError
    from google.protobuf.proto import parse_length_prefixed

    file = BytesIO(content)
    nodes = []
    try:
        metadata = parse_length_prefixed(messages["GlobalMetadata"], file)
        while (node := parse_length_prefixed(messages["Node"], file)) is not None:
            nodes.append(node)
    except (DecodeError, ValueError) as error:
        raise ConfigError(f"not a Chakra trace: {error}") from None
    if metadata is None:
        raise ConfigError("not a Chakra trace: it is empty")
    return metadata.version, nodes


def _nodes(
    messages: dict[str, Any], found: list[Transfer], rank: int, itemsize: int
) -> Iterator[Any]:
    mine = [transfer for transfer in found if rank in (transfer.source, transfer.target)]
    numbers = _numbers(mine, rank)
    for transfer in mine:
        numel = transfer.end - transfer.begin
        message = {
            "is_cpu_op": False,
            "comm_size": numel * itemsize,
            "comm_src": transfer.source,
            "comm_dst": transfer.target,
            "comm_tag": transfer.index,
        }
        if transfer.source == rank:
            waits = [numbers["held", index] for index in transfer.source_after]
            yield _node(messages, numbers, ("send", transfer.index), COMM_SEND_NODE, waits, message)
            continue
        waits = [numbers["held", index] for index in transfer.target_after]
        waits += [numbers["send", index] for index in transfer.target_sent]
        received = ("recv", transfer.index)
        if not transfer.adds:
            yield _node(messages, numbers, received, COMM_RECV_NODE, waits, message)
            continue
        # What is added arrives in a buffer of its own: only the sum has to wait.
        yield _node(messages, numbers, received, COMM_RECV_NODE, [], message)
        waits.append(numbers[received])
        work = {"is_cpu_op": False, "num_ops": numel, "tensor_size": numel * itemsize}
        yield _node(messages, numbers, ("add", transfer.index), COMP_NODE, waits, work)


def _numbers(mine: list[Transfer], rank: int) -> dict[tuple[str, int], int]:
    """Return each node's number, and as ``held`` that of the node after which a message counts."""
    numbers: dict[tuple[str, int], int] = {}
    count = 0
    for transfer in mine:
        sends = transfer.source == rank
        for name in ("send",) if sends else ("recv", "add") if transfer.adds else ("recv",):
            numbers[name, transfer.index] = count
            if not sends:
                numbers["held", transfer.index] = count
            count += 1
    return numbers


def _node(
    messages: dict[str, Any],
    numbers: dict[tuple[str, int], int],
    key: tuple[str, int],
    kind: int,
    waits: list[int],
    attributes: dict[str, int | bool],
) -> Any:
    name = f"{key[0]}_{key[1]}"
    node = messages["Node"](id=numbers[key], name=name, type=kind, data_deps=sorted(waits))
    for attribute, value in attributes.items():
        field = {"bool_val" if isinstance(value, bool) else "int64_val": value}
        node.attr.add(name=attribute, **field)
    return node


@cache
def _messages() -> dict[str, Any]:
    """Return the classes of the messages by name."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise ConfigError(
            "Chakra traces are protobuf messages; pip install 'topo-ar[chakra]'"
        ) from None
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="topo_ar/chakra_et.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    attribute.field.add(name="name", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    for name, number, kind in (
        ("int64_val", 9, kinds.TYPE_INT64),
        ("bool_val", 27, kinds.TYPE_BOOL),
    ):
        attribute.field.add(
            name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL, oneof_index=0
        )
    metadata = file.message_type.add(name="GlobalMetadata")
    metadata.field.add(name="version", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    node = file.message_type.add(name="Node")
    for name, number, kind, label in (
        ("id", 1, kinds.TYPE_UINT64, kinds.LABEL_OPTIONAL),
        ("name", 2, kinds.TYPE_STRING, kinds.LABEL_OPTIONAL),
        # An enum in the schema, which has the same form as an integer.
        ("type", 3, kinds.TYPE_INT32, kinds.LABEL_OPTIONAL),
        ("data_deps", 5, kinds.TYPE_UINT64, kinds.LABEL_REPEATED),
    ):
        node.field.add(name=name, number=number, type=kind, label=label)
    node.field.add(
        name="attr",
        number=10,
        type=kinds.TYPE_MESSAGE,
        label=kinds.LABEL_REPEATED,
        type_name=".ChakraProtoMsg.AttributeProto",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    }
