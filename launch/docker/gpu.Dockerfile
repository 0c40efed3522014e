# NVIDIA GPUs: CUDA comes with jax's wheels; the host has the driver and NVIDIA's container toolkit.
#
#   docker build -f launch/docker/gpu.Dockerfile -t sparse_dataflow:gpu .
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /sparse_dataflow
COPY . .
RUN pip install -c constraints.txt -e ".[cuda,data]"
# Any user may run it; a number, as Kubernetes does not trust names. Runs write to these two folders.
RUN useradd --uid 1000 sparse && mkdir /runs /cache && chmod 1777 /runs /cache
ENV XDG_CACHE_HOME=/cache PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
ENTRYPOINT ["sh", "launch/start_or_resume.sh"]
