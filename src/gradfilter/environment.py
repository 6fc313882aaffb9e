"""What the numbers of this machine depend on: versions, threads, devices, kernels.

torch is imported only where it is asked: the command line reads its own version from here.
"""

from __future__ import annotations

from importlib import metadata

LIBRARIES = ("torchvision", "timm", "segmentation-models-pytorch")


def about() -> dict[str, object]:
    """Versions, threads, devices and which kernels are in use."""
    import platform

    import torch

    import gradfilter
    from gradfilter import kernels

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gradfilter": gradfilter.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        **{name: version(name) for name in LIBRARIES},
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": cuda,
        **{f"kernels, {name}": text for name, text in kernels.status().items()},
    }


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
