# CPUs: trying things out, and the parts of a run that need no accelerator.
#
#   docker build -f launch/docker/cpu.Dockerfile -t sparse_dataflow:cpu .
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /sparse_dataflow
COPY . .
RUN pip install -c constraints.txt -e ".[data]"
# Any user may run it; a number, as Kubernetes does not trust names. Runs write to these two folders.
RUN useradd --uid 1000 sparse && mkdir /runs /cache && chmod 1777 /runs /cache
ENV XDG_CACHE_HOME=/cache PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
ENTRYPOINT ["sh", "launch/start_or_resume.sh"]
