# An image with the project installed. It builds with nothing but a package index:
#
#   docker build -t megatron-3d .
#   docker build -t megatron-3d:cuda --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime .
#
#   BASE      an image with Python 3.11 or newer. A torch of a version that the project takes is kept, else one is installed: on Linux
#             the wheels of torch bring CUDA's libraries, so an image without them trains on GPUs too (docker run --gpus all)
#   EXTRAS    extras of pyproject.toml, such as fsspec,wandb
#
# pip's own variables work as build arguments, such as PIP_EXTRA_INDEX_URL for an index with smaller, CPU-only wheels of torch.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG EXTRAS=
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1

# pgrep, for examples/launch_node.sh with LAUNCHER=torchrun
RUN apt-get update && apt-get install -y --no-install-recommends procps && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron-3d
COPY requirements.txt ./
RUN python -c "import sys; sys.exit(sys.version_info < (3, 11))" && python -m pip install -r requirements.txt
COPY pyproject.toml setup.py README.md LICENSE pretrain_gpt.py ./
COPY megatron megatron
COPY megatron_lab megatron_lab
COPY tools tools
COPY examples examples
RUN python -m pip install -e ".${EXTRAS:+[$EXTRAS]}" && useradd --create-home --uid 1000 trainer && chown trainer .

# Scripts take the environment as it is, instead of making .venv.
ENV NO_SETUP=1
USER trainer
CMD ["python", "pretrain_gpt.py", "--help"]
