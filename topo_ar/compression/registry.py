"""From the name of a codec to the code that does it."""

from topo_ar.compression.cast import Cast
from topo_ar.compression.none import Exact
from topo_ar.compression.protocol import Compressor
from topo_ar.compression.quantize import Quantized
from topo_ar.compression.randomk import RandomK
from topo_ar.compression.sign import ScaledSign
from topo_ar.compression.topk import TopK
from topo_ar.errors import ConfigError
from topo_ar.planning.codecs import Codec


def make(codec: Codec, seed: int = 0) -> Compressor:
    """Return a new compressor for `codec`; all ranks must give the same `seed`.

    Raises
    ------
    ConfigError
        If nothing here does this codec.
    """
    match codec.name:
        case "none":
            return Exact()
        case "fp16" | "bf16":
            return Cast(codec)
        case "int8" | "int4":
            return Quantized(codec)
        case "sign":
            return ScaledSign(codec)
        case "topk":
            return TopK(codec)
        case "randomk":
            return RandomK(codec, seed)
        case "powersgd":
            # Its linear algebra is imported by those who use it.
            from topo_ar.compression.powersgd import PowerSGD

            assert codec.argument is not None
            return PowerSGD(int(codec.argument), seed=seed)
    raise ConfigError(f"there is no compressor for the codec {codec}")
