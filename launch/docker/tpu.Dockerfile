# TPU hosts: libtpu comes with jax's extra.
#
#   docker build -f launch/docker/tpu.Dockerfile -t sparse_dataflow:tpu .
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /sparse_dataflow
COPY . .
RUN pip install -c constraints.txt -e ".[tpu,data]"
# Any user may run it; a number, as Kubernetes does not trust names. Runs write to these two folders.
RUN useradd --uid 1000 sparse && mkdir /runs /cache && chmod 1777 /runs /cache
ENV XDG_CACHE_HOME=/cache PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
ENTRYPOINT ["sh", "launch/start_or_resume.sh"]
