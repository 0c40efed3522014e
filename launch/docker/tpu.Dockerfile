# TPU hosts: libtpu comes with jax's extra.
#
#   docker build -f launch/docker/tpu.Dockerfile -t sparse_dataflow:tpu .
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /sparse_dataflow
COPY . .
RUN pip install -c constraints.txt -e ".[tpu]"
ENTRYPOINT ["sh", "launch/start_or_resume.sh"]
