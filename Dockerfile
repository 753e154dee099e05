# syntax=docker/dockerfile:1
# Images of rlflow. Never built by us: where this was written there was no Docker; it was checked by reading.
#
#   docker build --target cpu -t rlflow .
#   docker run --rm -v "$PWD/runs:/rlflow/runs" rlflow                       # the demo: a tiny model learns to search, no GPU
#
#   docker build --target gpu -t rlflow:gpu .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/rlflow/runs" -v "$HOME/.cache/huggingface:/hub" rlflow:gpu \
#       bash recipes/searchr1/run_train.sh --model Qwen/Qwen2.5-1.5B-Instruct ... --dry-run
#
# On a Mac add --platform linux/amd64 to both commands: some packages have no wheels for arm64 Linux. It runs translated, so slowly.

# ---------------------------------------------------------------- what both start from: the sources, in a place of their own
FROM scratch AS sources
COPY setup.py pyproject.toml README.md LICENSE CHANGELOG.md /rlflow/
COPY constraints /rlflow/constraints
COPY rlflow /rlflow/rlflow
COPY environments /rlflow/environments
COPY tools /rlflow/tools
COPY recipes /rlflow/recipes
COPY benchmarks /rlflow/benchmarks
COPY docs /rlflow/docs

# ---------------------------------------------------------------- CPU: the demo, tests and development
FROM python:3.11-slim-bookworm AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends git procps && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home user && mkdir -p /rlflow && chown user /rlflow
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=passive HF_HOME=/hub RAY_USAGE_STATS_ENABLED=0 HF_HUB_DISABLE_TELEMETRY=1
WORKDIR /rlflow
# Torch first and alone: the CPU build is a fifth of the other's size, and this layer outlives changes of the sources.
COPY constraints/cpu.txt /tmp/cpu.txt
RUN pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' /tmp/cpu.txt)"
COPY --from=sources --chown=user /rlflow /rlflow
RUN pip install -e '.[search,data,ray,tensorboard,judge]' -c constraints/cpu.txt \
    && mkdir -p /hub runs data && chown -R user /hub runs data /rlflow
USER user
CMD ["bash", "recipes/searchr1/run_train.sh"]

# ---------------------------------------------------------------- GPU: NVIDIA's image brings torch, Transformer Engine and NCCL
FROM nvcr.io/nvidia/pytorch:26.01-py3 AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    HF_HOME=/hub RAY_USAGE_STATS_ENABLED=0 HF_HUB_DISABLE_TELEMETRY=1
WORKDIR /rlflow
# vLLM pins a torch of its own: an environment of its own, which rlflow starts as a process. Unset, here and below: the image's
# PIP_CONSTRAINT, which holds every package at the version that the image has.
COPY constraints/gpu.txt /tmp/gpu.txt
RUN python -m venv /opt/vllm && env -u PIP_CONSTRAINT /opt/vllm/bin/pip install vllm -c /tmp/gpu.txt
ENV RLFLOW_VLLM_PYTHON=/opt/vllm/bin/python
COPY --from=sources /rlflow /rlflow
# What the image has stays as it is: its torch, triton and Transformer Engine were built for each other.
RUN pip list --format=freeze | grep -iE '^((pytorch.)?triton|torch|transformer.engine|numpy)(==|_)' > /tmp/kept.txt \
    && grep -E '^(megatron-core|faiss-gpu-cu12)==' /tmp/gpu.txt >> /tmp/kept.txt \
    && env -u PIP_CONSTRAINT pip install -e '.[search-gpu,data,ray,tensorboard,judge]' -c /tmp/kept.txt \
    && mkdir -p /hub runs data
CMD ["rlflow", "doctor"]
