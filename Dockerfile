# For GPU nodes: this checkout with its .venv in /megahead, as launch/kubernetes.yaml expects it. torch's wheels bring CUDA and
# NCCL; the driver is the node's (NVIDIA container toolkit).
#   docker build -t megahead .
#   docker run --rm --gpus all --shm-size=8g -v "$PWD/data:/megahead/data" -v "$PWD/runs:/megahead/runs" megahead \
#       deepspeed launch/pretrain.py --config configs/pythia-70m-headless.yaml
FROM python:3.11-slim-bookworm

# No nvcc: attention is torch's own kernel for documents (`varlen`), or flash-attn 4 (`.venv/bin/pip install -e '.[gpu]'`, a wheel).
# flash-attn 2 and 3 are built from source, in an image with CUDA's compiler.
# g++ for Triton and torch.compile; pdsh and ssh for hostfiles.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megahead
COPY Makefile ./
RUN make .venv/.torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY megahead megahead
COPY configs configs
RUN make install
COPY launch launch
COPY tools tools
COPY tests tests

ENV PATH=/megahead/.venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "tools/doctor.py"]
