"""The parameters of some published models, in the order of their definition.

The layer sizes are those of the papers and of the implementations that the counts are from; a
test compares every sum with the published count.
"""

from collections.abc import Callable, Iterator

from topo_ar.errors import ConfigError
from topo_ar.planning.parameters import Parameter, Shape, itemsize

Named = Iterator[tuple[str, Shape]]

# Published counts. ResNet and VGG: "num_params" of the ImageNet weights in the documentation of
# torchvision.models. BERT: the encoder with pooler of google-research/bert's checkpoints, which
# the paper (Devlin et al., 2019) rounds to 110 M and 340 M. GPT-2: the checkpoints of openai/gpt-2,
# which their README rounds to 124 M and 1558 M.
PUBLISHED_COUNTS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


def model_parameters(name: str, dtype: str = "float32") -> tuple[Parameter, ...]:
    """Return the parameters of the published model `name`.

    Raises
    ------
    ConfigError
        If the model is not in the table.
    """
    itemsize(dtype)
    make = _MODELS.get(name)
    if make is None:
        raise ConfigError(
            f"{name!r} is not a known model and not a file; known are {', '.join(_MODELS)}, or "
            "list the parameters in a file with lines such as layer.weight,1024x512"
        )
    return tuple(Parameter(name, shape, dtype) for name, shape in make())


def _linear(name: str, outputs: int, inputs: int) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Named:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _convolution(name: str, outputs: int, inputs: int, side: int) -> Named:
    yield f"{name}.weight", (outputs, inputs, side, side)
    yield from _norm(f"{name}.norm", outputs)


def _resnet(depths: tuple[int, ...], *, bottleneck: bool) -> Named:
    """He et al., "Deep Residual Learning for Image Recognition" (2016), table 1."""
    yield from _convolution("stem", 64, 3, 7)
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        outputs = 4 * width if bottleneck else width
        for block in range(depth):
            name = f"stage{stage}.{block}"
            if bottleneck:
                yield from _convolution(f"{name}.a", width, inputs, 1)
                yield from _convolution(f"{name}.b", width, width, 3)
                yield from _convolution(f"{name}.c", outputs, width, 1)
            else:
                yield from _convolution(f"{name}.a", width, inputs, 3)
                yield from _convolution(f"{name}.b", width, width, 3)
            if inputs != outputs:
                yield from _convolution(f"{name}.shortcut", outputs, inputs, 1)
            inputs = outputs
    yield from _linear("head", 1000, inputs)


def _vgg16() -> Named:
    """Simonyan and Zisserman, "Very Deep Convolutional Networks" (2015), table 1, column D."""
    inputs = 3
    for i, width in enumerate([64] * 2 + [128] * 2 + [256] * 3 + [512] * 6):
        yield f"features.{i}.weight", (width, inputs, 3, 3)
        yield f"features.{i}.bias", (width,)
        inputs = width
    yield from _linear("classifier.0", 4096, 512 * 7 * 7)
    yield from _linear("classifier.1", 4096, 4096)
    yield from _linear("classifier.2", 1000, 4096)


def _bert(width: int, depth: int) -> Named:
    """Devlin et al., "BERT" (2019), section 3; 30522 word pieces, 512 positions, 2 segments."""
    yield "embeddings.word", (30522, width)
    yield "embeddings.position", (512, width)
    yield "embeddings.segment", (2, width)
    yield from _norm("embeddings.norm", width)
    for layer in range(depth):
        name = f"layer.{layer}"
        for part in ("query", "key", "value", "output"):
            yield from _linear(f"{name}.{part}", width, width)
        yield from _norm(f"{name}.attention_norm", width)
        yield from _linear(f"{name}.up", 4 * width, width)
        yield from _linear(f"{name}.down", width, 4 * width)
        yield from _norm(f"{name}.norm", width)
    yield from _linear("pooler", width, width)


def _gpt2(width: int, depth: int) -> Named:
    """Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2."""
    yield "embeddings.word", (50257, width)
    yield "embeddings.position", (1024, width)
    for layer in range(depth):
        name = f"layer.{layer}"
        yield from _norm(f"{name}.norm1", width)
        yield from _linear(f"{name}.attention", 3 * width, width)
        yield from _linear(f"{name}.output", width, width)
        yield from _norm(f"{name}.norm2", width)
        yield from _linear(f"{name}.up", 4 * width, width)
        yield from _linear(f"{name}.down", width, 4 * width)
    yield from _norm("norm", width)


_MODELS: dict[str, Callable[[], Named]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "vgg16": _vgg16,
    "bert-base": lambda: _bert(768, 12),
    "bert-large": lambda: _bert(1024, 24),
    "gpt2": lambda: _gpt2(768, 12),
    "gpt2-xl": lambda: _gpt2(1600, 48),
}
