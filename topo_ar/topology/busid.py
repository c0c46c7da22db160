"""PCI bus ids in one spelling: ``0000:03:00.0``, lower case, four digits or more of domain."""


def normal_busid(text: str) -> str:
    """Return a bus id as the kernel writes it; NVML writes eight digits of domain, lspci none."""
    text = text.strip().lower()
    if text.count(":") == 1:
        return f"0000:{text}"
    domain, _, rest = text.partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return text
