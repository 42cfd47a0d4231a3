{{- /* Baton's configuration, one for all processes of the release. Sizes of pools are not in it: who resizes a pool need
restart nothing but the router, which is told them in its environment. */}}
{{- define "baton.config" -}}
{{- $values := .Values -}}
{{- $models := list -}}
{{- range $model := $values.models }}
{{- $pools := dict -}}
{{- range $role, $own := $model.pools }}
{{- $pool := mergeOverwrite (deepCopy $values.poolDefaults) $own -}}
{{- $engine := $pool.engine -}}
{{- $_ := set $pools $role (dict
    "device" $engine.device "num_threads" $engine.threads "max_step_tokens" $engine.maxStepTokens
    "max_sequences" $engine.maxSequences "max_queue" $engine.maxQueue "policy" $engine.policy
    "resources" (dict "num_cpus" (ternary 1 0 (eq $values.placement.backend "ray")) "num_gpus" (ternary $pool.accelerator.count 0 (hasPrefix "nvidia.com/" $pool.accelerator.resource))
      "custom" (dict (printf "baton_%s_%s" (include "baton.slug" $model.name | replace "-" "_") $role) 1))) -}}
{{- end }}
{{- $scaling := $values.autoscaling -}}
{{- $mode := index (dict "off" "off" "observe" "observe" "hpa" "off" "keda" "off" "coupled" "act") $scaling.mode -}}
{{- $autoscale := dict "mode" $mode "ttft_s" $scaling.ttftSeconds "tpot_s" $scaling.tpotSeconds "prefill" $scaling.prefill "decode" $scaling.decode "unified" $scaling.unified -}}
{{- $own := dict "name" $model.name "path" ($model.path | default $model.name) "pools" $pools "autoscale" $autoscale -}}
{{- $models = append $models (mergeOverwrite (deepCopy ($model.config | default dict)) $own) -}}
{{- end }}
{{- $auth := $values.gateway.auth -}}
{{- $access := dict "database" ($auth.database | default "/var/lib/baton/keys.db") "keys_file" "/etc/baton-auth/keys.yaml" "admin_key_file" "/etc/baton-auth/admin-key" -}}
{{- with $auth.limitsStore }}{{ $_ := set $access "limits_store" . }}{{ end -}}
{{- if $auth.databasePassword.secret }}{{ $_ := set $access "database_password_file" (printf "/etc/baton-database/%s" $auth.databasePassword.key) }}{{ end -}}
{{- if $auth.limitsPassword.secret }}{{ $_ := set $access "limits_password_file" (printf "/etc/baton-limits/%s" $auth.limitsPassword.key) }}{{ end -}}
{{- $gateway := dict
    "listen" "0.0.0.0:8000" "http_listen" "0.0.0.0:9090" "access" $access
    "cors" (dict "origins" $values.gateway.corsOrigins)
    "limits" (dict "drain_wait_s" $values.gateway.lifecycle.drainWaitSeconds "drain_s" $values.gateway.lifecycle.drainSeconds) -}}
{{- if $values.gateway.tls.secret }}{{ $_ := set $gateway "tls" (dict "cert" "/etc/baton-https/tls.crt" "key" "/etc/baton-https/tls.key") }}{{ end -}}
{{- $lease := $values.transfer.leaseSeconds -}}
{{- $config := dict
    "models" $models
    "gateway" $gateway
    "router" (dict "listen" "0.0.0.0:7000" "http_listen" "0.0.0.0:9090" "mode" $values.router.mode "fallback" $values.router.fallback
      "advertise" (printf "%s-router.%s.svc:7000" (include "baton.fullname" .) .Release.Namespace))
    "worker" (dict "host" "auto" "port" 7100 "http_port" 9090 "pin_threads" false)
    "transfer" (dict "backend" $values.transfer.backend "fallback" $values.transfer.fallback "digest" $values.transfer.digest
      "lease_s" $lease "renew_s" (divf $lease 4.0))
    "telemetry" (dict "log_level" $values.observability.logLevel) -}}
{{- with $values.observability.otlpEndpoint }}{{ $_ := set $config.telemetry "otlp_endpoint" . }}{{ end -}}
{{- if eq $values.placement.backend "ray" }}
{{- $_ := set $config "launcher" (dict "kind" "ray" "ray" (dict "address" (printf "%s-ray-head-svc.%s.svc:6379" (include "baton.fullname" .) .Release.Namespace))) -}}
{{- end }}
{{- if $values.security.mtls.enabled }}
{{- $_ := set $config "security" (dict "tls" "files" "domain" $values.security.mtls.domain "cert" "/etc/baton-tls/tls.crt" "key" "/etc/baton-tls/tls.key" "ca" "/etc/baton-tls/ca.crt") -}}
{{- end }}
{{- mergeOverwrite (deepCopy $values.config) $config | toYaml -}}
{{- end }}

{{- /* What a change of restarts the processes. */}}
{{- define "baton.checksums" -}}
checksum/config: {{ include "baton.config" . | sha256sum }}
{{- end }}
