# CPUs: trying things out, and the parts of a run that need no accelerator.
#
#   docker build -f launch/docker/cpu.Dockerfile -t sparse_dataflow:cpu .
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /sparse_dataflow
COPY . .
RUN pip install -c constraints.txt -e "."
ENTRYPOINT ["sh", "launch/start_or_resume.sh"]
