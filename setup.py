"""Package metadata; the settings of the development tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"
DOCUMENTATION = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"]
EXAMPLES = ["matplotlib>=3.8"]
HUGGING_FACE = ["safetensors>=0.5"]
# torchtitan needs Python 3.11.
INTEGRATIONS = [
    "accelerate>=1.15",
    "bitsandbytes>=0.49",
    "megatron-core>=0.16.1",
    "peft>=0.19",
    "pyyaml>=6",
    "tensorboard>=2.20",
    "torchao>=0.18",
    "torchtitan>=0.3; python_version >= '3.11'",
    "transformers>=5.20",
    "trl>=1.16",
]
TRITON = ["triton>=3.6; platform_system == 'Linux'"]
DEVELOPMENT = [
    "hypothesis>=6.100",
    "mypy>=1.18",
    "pytest>=8.2",
    "pytest-xdist>=3.7",
    "ruff>=0.14",
    "setuptools>=77.0.3",
]

setup(
    name="megatron-fsdp-dbuffer",
    version="0.1.0",
    description="Megatron-style sharded training in PyTorch over flat distributed buffers",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The DBuffer authors",
    # What it stands on; the project itself has no address but the folder that it was installed from.
    project_urls={
        "PyTorch FSDP2": "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        "Megatron-LM": "https://github.com/NVIDIA/Megatron-LM",
        "ZeRO": "https://arxiv.org/abs/1910.02054",
    },
    python_requires=">=3.10",
    # An installed package called `kernels` would overwrite another project's; the folder keeps the name, the import
    # does not.
    package_dir={"dbuffer_kernels": "kernels/dbuffer_kernels"},
    packages=[
        *find_packages(where="kernels", include=["dbuffer_kernels", "dbuffer_kernels.*"]),
        *find_packages(include=["dbuffer", "dbuffer.*", "megatron_fsdp", "megatron_fsdp.*"]),
    ],
    package_data={
        "": ["py.typed"],
        "megatron_fsdp.planning": ["error_bar.json"],
        "megatron_fsdp.planning.catalog": ["families.json", "models/*.json"],
    },
    install_requires=["torch>=2.11", "numpy>=1.26"],
    extras_require={
        "triton": TRITON,
        "hf": HUGGING_FACE,
        "docs": DOCUMENTATION,
        "examples": EXAMPLES,
        "integrations": [*INTEGRATIONS, *HUGGING_FACE],
        "dev": [*DEVELOPMENT, *EXAMPLES, *HUGGING_FACE, *TRITON],
    },
    entry_points={"console_scripts": ["megatron-fsdp = megatron_fsdp.__main__:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Operating System :: POSIX :: Linux",
        "Typing :: Typed",
    ],
)
