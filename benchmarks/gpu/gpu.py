"""What the GPU benchmarks need of the machine."""

from __future__ import annotations

import importlib.util
import sys


def require(*packages: str) -> str:
    """The GPU's name. Ends the program, in one line and with status 2, where there is none or a package is missing."""
    missing = [
        name for name in ("torch", "megatron", *packages) if importlib.util.find_spec(name) is None
    ]
    if missing:
        stop(f"not installed: {', '.join(missing)} (see benchmarks/gpu/README.md)")
    import torch

    if not torch.cuda.is_available():
        stop(
            f"torch {torch.__version__} sees no GPU; an NVIDIA GPU with bfloat16 and a CUDA build of torch are needed"
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        stop(
            f"{torch.cuda.get_device_name()} has no bfloat16; compute capability 8.0 or above is needed"
        )
    return torch.cuda.get_device_name()


def stop(reason: str) -> None:
    print(f"{sys.argv[0]}: {reason}", file=sys.stderr)
    sys.exit(2)
