{{- /* (root, model, role, pool, component): the pod of a worker, for every kind of workload that makes one. */}}
{{- define "baton.workerTemplate" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "baton.selector" . | nindent 4 }}
    baton.dev/metrics: "true"
    baton.dev/worker: "true"
  annotations:
    {{- include "baton.checksums" .root | nindent 4 }}
    {{- with .pool.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccount" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "baton.workerGrace" . }}
  {{- include "baton.scheduling" (merge (dict "section" .pool) .) | nindent 2 }}
  securityContext:
    {{- include "baton.podSecurity" .root | nindent 4 }}
  {{- include "baton.workerClaims" . | nindent 2 }}
  {{- $image := include "baton.image" (dict "root" .root "name" $values.image.worker) }}
  {{- include "baton.waitForModels" (dict "root" .root "image" $image) | nindent 2 }}
  containers:
    - name: worker
      image: {{ $image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command:
        - baton
        - worker
        - --config
        - /etc/baton/cluster.yaml
        - --model
        - {{ .model.name | quote }}
        - --role
        - {{ .role }}
        - --worker-id
        - $(POD_NAME)
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- include "baton.workerEnv" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 7100}
        - {name: http, containerPort: 9090}
      {{- include "baton.probes" .pool.lifecycle | nindent 6 }}
      {{- with .pool.lifecycle.preStopSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ . }}}
      {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      {{- include "baton.workerContainer" . | nindent 6 }}
  volumes:
    {{- include "baton.workerVolumes" . | nindent 4 }}
{{- end }}

{{- /* What differs from worker to worker; quoted twice, for Baton reads such values as YAML. */}}
{{- define "baton.workerEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- {name: BATON__WORKER__LABELS__HOST, value: '"$(NODE_NAME)"'}
{{- range $name, $value := .pool.labels }}
- {name: BATON__WORKER__LABELS__{{ upper $name }}, value: {{ $value | toJson | squote }}}
{{- end }}
- {name: BATON__WORKER__DRAIN_S, value: {{ .pool.lifecycle.drainSeconds | quote }}}
{{ include "baton.commonEnv" .root }}
{{- range $name, $value := .pool.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "baton.workerClaims" -}}
{{- with .pool.accelerator.claimTemplate }}
resourceClaims:
  - name: accelerator
    resourceClaimTemplateName: {{ . }}
{{- end }}
{{- end }}

{{- /* Devices are asked for as limits; requests follow them. */}}
{{- define "baton.workerContainer" -}}
{{- $pool := .pool -}}
{{- $resources := deepCopy $pool.resources -}}
{{- $limits := $resources.limits | default dict -}}
{{- if $pool.accelerator.resource }}{{ $_ := set $limits $pool.accelerator.resource $pool.accelerator.count }}{{ end -}}
{{- if $pool.rdma.resource }}{{ $_ := set $limits $pool.rdma.resource $pool.rdma.count }}{{ end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- if $pool.accelerator.claimTemplate }}{{ $_ := set $resources "claims" (list (dict "name" "accelerator")) }}{{ end -}}
resources: {{ toJson $resources }}
securityContext:
  {{- include "baton.containerSecurity" (dict "add" (ternary (list "IPC_LOCK") list (and (ne $pool.rdma.resource "") $pool.rdma.ipcLock))) | nindent 2 }}
volumeMounts:
  {{- include "baton.commonMounts" .root | nindent 2 }}
  - {name: shm, mountPath: /dev/shm}
  {{- include "baton.tlsMount" .root | nindent 2 }}
{{- end }}

{{- define "baton.workerVolumes" -}}
{{ include "baton.commonVolumes" .root }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .pool.shmSize }}}
{{- include "baton.tlsVolume" (dict "root" .root "identity" "worker") }}
{{- end }}
