"""Which CUDA index each of NVML's GPUs has: logical to physical, where that can be told."""

import re

from topo_ar.topology.nvml_answers import NvmlAnswers


def cuda_order(answers: NvmlAnswers) -> dict[int, int]:
    """Return the CUDA index of each visible GPU by its NVML index.

    CUDA counts as NVML does, in order of the bus, when CUDA_DEVICE_ORDER is PCI_BUS_ID or all GPUs
    are of one model; otherwise the fastest comes first, and the answer is empty: not known.
    CUDA_VISIBLE_DEVICES may hold numbers in that count or beginnings of UUIDs; what follows a
    token that names no GPU is ignored, as CUDA ignores it, and a GPU named twice makes it see none.
    A MIG instance is not a whole GPU and ends the list too.
    """
    gpus = answers.gpus
    models = {str(gpu.name) for gpu in gpus}
    if len(models) > 1 and answers.order != "PCI_BUS_ID":
        return {}
    if answers.visible is None:
        return {gpu.index: gpu.index for gpu in gpus}
    uuids = {gpu.index: gpu.uuid for gpu in gpus if isinstance(gpu.uuid, str)}
    found: dict[int, int] = {}
    for token in (part.strip() for part in answers.visible.split(",")):
        if token.startswith("GPU-"):
            named = [index for index, uuid in uuids.items() if uuid.startswith(token)]
        else:
            # As strtoul reads it: what follows the digits is ignored.
            digits = re.match("[+]?([0-9]{1,9})", token)
            named = [gpu.index for gpu in gpus if digits and int(digits[1]) == gpu.index]
        if len(named) != 1:
            break
        if named[0] in found:
            return {}
        found[named[0]] = len(found)
    return found


def visibility_note(answers: NvmlAnswers) -> str:
    """Return a sentence on what CUDA sees of the GPUs, empty where it sees all as NVML does."""
    if not answers.gpus:
        return ""
    order = cuda_order(answers)
    if not order and answers.visible is None:
        return (
            "the GPUs are of several models, and CUDA counts the fastest first; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID to have its order agree with that of NVML"
        )
    if answers.visible is None:
        return ""
    pairs = ", ".join(f"cuda:{cuda} is gpu{nvml}" for nvml, cuda in sorted(order.items()))
    text = f"CUDA_VISIBLE_DEVICES={answers.visible}: " + (pairs or "CUDA sees no whole GPU")
    if "MIG-" in answers.visible:
        text += "; MIG instances are parts of a GPU and are not told apart here"
    return text + "; all GPUs are listed"
