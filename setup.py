"""Builds the optional C kernels; everything else is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

source = Path("src/gradfilter/kernels/cpu.c")
sources = sorted(source.parent.glob("**/*.c"))  # cpu.c includes the others
source_hash = hashlib.sha256(b"".join(f.read_bytes() for f in sources)).hexdigest()[:16]

setup(
    ext_modules=[
        Extension(
            "gradfilter.kernels._cpu",
            [str(source)],
            depends=list(map(str, sources)),
            define_macros=[("SOURCE_HASH", f'"{source_hash}"')],
            # As FLAGS in kernels/cpu_library.py.
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=fast",
                "-fvisibility=hidden",
            ],
            optional=True,  # without a compiler the package runs on its PyTorch kernels
        )
    ]
)
