#!/usr/bin/env bash
# A cell without GPUs on this machine: images, a kind cluster, the chart, and one real request through it.
# Needs docker, kind, kubectl and helm. Again: it goes on from where it was. Away with it: kind delete cluster --name baton
set -euo pipefail
cd "$(dirname "$0")/../.."

for program in docker kind kubectl helm; do
  command -v "$program" >/dev/null || { echo "up.sh: $program is not installed" >&2; exit 1; }
done

docker build -f deploy/docker/gateway.Dockerfile -t baton-gateway:0.1.0 .
docker build -f deploy/docker/worker-cpu.Dockerfile -t baton-worker-cpu:0.1.0 .
kind get clusters | grep -qx baton || kind create cluster --name baton --config deploy/kind/cluster.yaml
kind load docker-image --name baton baton-gateway:0.1.0 baton-worker-cpu:0.1.0
helm upgrade --install cell deploy/helm/baton --kube-context kind-baton --namespace llm --create-namespace \
  -f deploy/helm/baton/values-kind.yaml --wait --timeout 10m
helm test cell --kube-context kind-baton --namespace llm --logs
