"""One rank of `topo_ar.mirror`: calls the function and leaves its result in a file."""

import os
import pickle
import sys
import traceback
from multiprocessing.spawn import import_main_path
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from topo_ar.errors import ConfigError
from topo_ar.integrations.mirror import CALL, ERROR, MIRROR_ENV, RESULT, Call, Failure, packed


def main() -> int:
    """Do this rank's part under the environment that torchrun would set."""
    folder, rank = Path(os.environ[MIRROR_ENV]), os.environ["RANK"]
    call = msgspec.msgpack.decode((folder / CALL).read_bytes(), type=Call)
    sys.path[:] = call.sys_path
    try:
        _write(folder / f"{RESULT}{rank}", _result(call))
    except BaseException as error:
        _write(folder / f"{ERROR}{rank}", msgspec.msgpack.encode(_failure(error)))
        return 1
    return 0


def _result(call: Call) -> bytes:
    if call.main_path:
        import_main_path(call.main_path)
    del os.environ[MIRROR_ENV]
    fn, args = pickle.loads(call.packed)
    use_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if use_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_gpus else "gloo")
    result = packed(fn(*args))
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _failure(error: BaseException) -> Failure:
    try:
        data = packed(error)
    except ConfigError:
        data = b""
    told = "".join(traceback.format_exception(error))
    return Failure(type(error).__name__, str(error), told, data)


def _write(path: Path, data: bytes) -> None:
    """Write whole or not at all."""
    partial = path.with_name(f"_{path.name}")
    partial.write_bytes(data)
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
