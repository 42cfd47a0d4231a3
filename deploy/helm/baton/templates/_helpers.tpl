{{- /* Names are cut so that what Kubernetes derives from them stays below 63 characters. */}}
{{- define "baton.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "baton" $name) }}{{ $name = printf "%s-baton" $name }}{{ end -}}
{{- $name | trunc 22 | trimSuffix "-" -}}
{{- end }}

{{- define "baton.slug" -}}
{{- regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-" | trunc 24 | trimSuffix "-" -}}
{{- end }}

{{- /* (root, component) and for pools (model): what a selector names. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
baton.dev/model: {{ include "baton.slug" .name }}
{{- end }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end }}

{{- /* (root, model, role) */}}
{{- define "baton.poolName" -}}
{{ include "baton.fullname" .root }}-{{ include "baton.slug" .model.name }}-{{ .role }}
{{- end }}

{{- define "baton.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "baton.fullname" .) -}}
{{- end }}

{{- define "baton.authSecret" -}}
{{- .Values.gateway.auth.existingSecret | default (printf "%s-auth" (include "baton.fullname" .)) -}}
{{- end }}

{{- define "baton.cacheClaim" -}}
{{- .Values.modelCache.existingClaim | default (printf "%s-models" (include "baton.fullname" .)) -}}
{{- end }}

{{- /* (root, identity): the Secret that proves it. */}}
{{- define "baton.tlsSecret" -}}
{{- index .root.Values.security.mtls.secrets .identity | default (printf "%s-%s-tls" (include "baton.fullname" .root) .identity) -}}
{{- end }}

{{- define "baton.rayTokenSecret" -}}
{{- .Values.ray.auth.secret | default (printf "%s-ray-auth" (include "baton.fullname" .)) -}}
{{- end }}

{{- /* Whether somebody else than this chart's values owns the sizes of pools. */}}
{{- define "baton.isAutoscaled" -}}
{{- if has .Values.autoscaling.mode (list "hpa" "keda" "coupled") }}true{{ end -}}
{{- end }}

{{- define "baton.hasPlacer" -}}
{{- if or (eq .Values.placement.backend "ray") (eq .Values.autoscaling.mode "coupled") }}true{{ end -}}
{{- end }}

{{- /* (pool): where a terminated worker has finished its answers and its leases have ended. Never typed by hand. */}}
{{- define "baton.workerGrace" -}}
{{- $life := .pool.lifecycle -}}
{{- add $life.preStopSeconds $life.drainSeconds (ceil .root.Values.transfer.leaseSeconds) 15 -}}
{{- end }}

{{- define "baton.gatewayGrace" -}}
{{- add .Values.gateway.lifecycle.drainWaitSeconds .Values.gateway.lifecycle.drainSeconds 15 -}}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .add }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{- /* (root, section: gateway, router, placer or a pool): where a pod may run. */}}
{{- define "baton.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .section.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .section.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .section.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .section.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .section.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- $spread := dict "hostname" "kubernetes.io/hostname" "zone" "topology.kubernetes.io/zone" -}}
{{- with index $spread (.section.spread | default "none") }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" $ | nindent 8 }}
{{- end }}
{{- end }}

{{- define "baton.probes" -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- /* What every container of ours needs: writable places beside a read-only root, the model cache, the hub's token. */}}
{{- define "baton.commonEnv" -}}
- {name: HOME, value: /var/lib/baton}
- {name: TMPDIR, value: /tmp}
{{- if .Values.modelCache.enabled }}
- {name: HF_HOME, value: /models}
- {name: HF_HUB_OFFLINE, value: {{ ternary "1" "0" .Values.modelCache.prefetch | quote }}}
{{- end }}
{{- end }}

{{- define "baton.commonMounts" -}}
- {name: config, mountPath: /etc/baton, readOnly: true}
- {name: home, mountPath: /var/lib/baton}
- {name: tmp, mountPath: /tmp}
{{- if .Values.modelCache.enabled }}
- {name: models, mountPath: /models, readOnly: {{ .Values.modelCache.prefetch }}}
{{- end }}
{{- end }}

{{- define "baton.commonVolumes" -}}
- name: config
  configMap: {name: {{ include "baton.fullname" . }}}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- if .Values.modelCache.enabled }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "baton.cacheClaim" . }}}
{{- end }}
{{- end }}

{{- define "baton.tlsMount" -}}
{{- if .Values.security.mtls.enabled }}
- {name: tls, mountPath: /etc/baton-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.tlsVolume" -}}
{{- if .root.Values.security.mtls.enabled }}
- name: tls
  secret: {secretName: {{ include "baton.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- /* (root, image): pods whose models are fetched by the Job wait for it; it is tried again until they are there. */}}
{{- define "baton.waitForModels" -}}
{{- if and .root.Values.modelCache.enabled .root.Values.modelCache.prefetch }}
initContainers:
  - name: wait-for-models
    image: {{ .image }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [baton, config, check, --config, /etc/baton/cluster.yaml]
    env:
      {{- include "baton.commonEnv" .root | nindent 6 }}
    securityContext:
      {{- include "baton.containerSecurity" dict | nindent 6 }}
    resources:
      requests: {cpu: 100m, memory: 256Mi}
      limits: {memory: 2Gi}
    volumeMounts:
      {{- include "baton.commonMounts" .root | nindent 6 }}
{{- end }}
{{- end }}
