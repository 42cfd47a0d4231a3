{{- /* What a schema cannot say. Each message names the key, and what to change. */}}
{{- define "baton.validate" -}}
{{- $values := .Values -}}
{{- $wrong := list -}}
{{- $slugs := list -}}
{{- $isRay := eq $values.placement.backend "ray" -}}
{{- $mode := $values.autoscaling.mode -}}
{{- range $index, $model := $values.models }}
{{- $at := printf "models[%d]" $index -}}
{{- $slug := include "baton.slug" $model.name -}}
{{- if not $slug }}{{ $wrong = append $wrong (printf "%s.name: %q has no letter or digit to name objects by" $at $model.name) }}{{ end -}}
{{- if has $slug $slugs }}{{ $wrong = append $wrong (printf "%s.name: %q and another model give the same names to objects (%s); their first 24 letters and digits must differ" $at $model.name $slug) }}{{ end -}}
{{- $slugs = append $slugs $slug -}}
{{- if ne (hasKey $model.pools "prefill") (hasKey $model.pools "decode") }}{{ $wrong = append $wrong (printf "%s.pools: prefill and decode go together, or use unified" $at) }}{{ end -}}
{{- range $key := list "name" "path" "pools" "autoscale" }}
{{- if hasKey ($model.config | default dict) $key }}{{ $wrong = append $wrong (printf "%s.config.%s: set by this chart; use the key of the chart" $at $key) }}{{ end -}}
{{- end }}
{{- $sizes := dict -}}
{{- range $role, $own := $model.pools }}
{{- $at := printf "%s.pools.%s" $at $role -}}
{{- $pool := mergeOverwrite (deepCopy $values.poolDefaults) $own -}}
{{- $device := $pool.accelerator -}}
{{- $_ := set $sizes $role $pool.replicas -}}
{{- if and $device.claimTemplate (or $device.resource $device.count) }}{{ $wrong = append $wrong (printf "%s.accelerator: claimTemplate stands in place of resource and count" $at) }}{{ end -}}
{{- if and $device.resource (not $device.count) }}{{ $wrong = append $wrong (printf "%s.accelerator.count: how many of %s?" $at $device.resource) }}{{ end -}}
{{- if and $device.count (not $device.resource) }}{{ $wrong = append $wrong (printf "%s.accelerator.resource: %v of what? Such as nvidia.com/gpu" $at $device.count) }}{{ end -}}
{{- if and (contains "/mig-" $device.resource) (gt (int $device.count) 1) }}{{ $wrong = append $wrong (printf "%s.accelerator.count: a worker computes on one MIG slice, not on %v: raise replicas" $at $device.count) }}{{ end -}}
{{- if and (eq $pool.engine.device "cuda") (not $device.count) (not $device.claimTemplate) }}{{ $wrong = append $wrong (printf "%s.engine.device: cuda needs an accelerator: set resource and count, or claimTemplate" $at) }}{{ end -}}
{{- if and (ne $pool.engine.device "cuda") (or $device.count $device.claimTemplate) }}{{ $wrong = append $wrong (printf "%s.accelerator: engine.device is %s, which leaves it idle; set engine.device to cuda" $at $pool.engine.device) }}{{ end -}}
{{- if and $pool.rdma.resource (not $pool.rdma.count) }}{{ $wrong = append $wrong (printf "%s.rdma.count: how many of %s?" $at $pool.rdma.resource) }}{{ end -}}
{{- if and $pool.rdma.count (not $pool.rdma.resource) }}{{ $wrong = append $wrong (printf "%s.rdma.resource: %v of what? Such as rdma/hca_shared_devices_a" $at $pool.rdma.count) }}{{ end -}}
{{- if and $pool.rdma.resource (ne $values.transfer.backend "nixl") }}{{ $wrong = append $wrong (printf "%s.rdma.resource: transfer.backend %s does not use it; say nixl" $at $values.transfer.backend) }}{{ end -}}
{{- if and (eq (toString $pool.rollout.maxSurge) "0") (eq (toString $pool.rollout.maxUnavailable) "0") }}{{ $wrong = append $wrong (printf "%s.rollout: with maxSurge and maxUnavailable both 0 no pod can ever be replaced" $at) }}{{ end -}}
{{- if and $pool.topologyKey (eq (int $pool.nodes) 1) }}{{ $wrong = append $wrong (printf "%s.topologyKey: is for groups of pods; set nodes above 1" $at) }}{{ end -}}
{{- if and $pool.topologyKey $isRay }}{{ $wrong = append $wrong (printf "%s.topologyKey: KubeRay knows none; use affinity" $at) }}{{ end -}}
{{- range $name, $_ := $pool.env }}
{{- if hasPrefix "BATON_" $name }}{{ $wrong = append $wrong (printf "%s.env.%s: Baton's own settings stand in config, secrets in Secrets" $at $name) }}{{ end -}}
{{- end }}
{{- $bounds := index $values.autoscaling $role -}}
{{- if and (has $mode (list "hpa" "keda" "coupled")) (or (lt (int $pool.replicas) (int $bounds.min)) (gt (int $pool.replicas) (int $bounds.max))) }}{{ $wrong = append $wrong (printf "%s.replicas: %v is outside of autoscaling.%s, %v to %v" $at $pool.replicas $role $bounds.min $bounds.max) }}{{ end -}}
{{- end }}
{{- if and (hasKey $sizes "prefill") (hasKey $sizes "decode") }}
{{- if ne (eq (int $sizes.prefill) 0) (eq (int $sizes.decode) 0) }}{{ $wrong = append $wrong (printf "%s.pools: prefill.replicas is %v and decode.replicas %v; both 0, or neither" $at $sizes.prefill $sizes.decode) }}{{ end -}}
{{- end }}
{{- end }}

{{- $auth := $values.gateway.auth -}}
{{- if not (or $auth.existingSecret $auth.generate) }}{{ $wrong = append $wrong "gateway.auth.existingSecret: name a Secret with keys.yaml and admin-key, or set gateway.auth.generate=true; without keys no gateway serves other machines" }}{{ end -}}
{{- range $key := list "database" "limitsStore" }}
{{- if regexMatch "://[^/]*:[^/]*@" (index $auth $key) }}{{ $wrong = append $wrong (printf "gateway.auth.%s: holds a password; put it into a Secret" $key) }}{{ end -}}
{{- end }}
{{- if and $auth.databasePassword.secret (not $auth.database) }}{{ $wrong = append $wrong "gateway.auth.databasePassword.secret: of which database? Set gateway.auth.database" }}{{ end -}}
{{- if and $auth.limitsPassword.secret (not $auth.limitsStore) }}{{ $wrong = append $wrong "gateway.auth.limitsPassword.secret: of which store? Set gateway.auth.limitsStore" }}{{ end -}}

{{- range $role := list "prefill" "decode" "unified" }}
{{- $bounds := index $values.autoscaling $role -}}
{{- if gt (int $bounds.min) (int $bounds.max) }}{{ $wrong = append $wrong (printf "autoscaling.%s.min: %v is more than max, %v" $role $bounds.min $bounds.max) }}{{ end -}}
{{- end }}
{{- if and (has $mode (list "hpa" "keda")) $isRay }}{{ $wrong = append $wrong (printf "autoscaling.mode: %s has nothing to scale under placement.backend ray; say coupled" $mode) }}{{ end -}}
{{- if and (eq $mode "keda") (not $values.autoscaling.keda.prometheus) }}{{ $wrong = append $wrong "autoscaling.keda.prometheus: where are the numbers? Such as http://prometheus.monitoring:9090" }}{{ end -}}
{{- if and (eq $mode "hpa") (eq $values.autoscaling.hpa.metric "cpu") (not (regexMatch "^[0-9]+$" $values.autoscaling.hpa.target)) }}{{ $wrong = append $wrong (printf "autoscaling.hpa.target: %q is no percentage of the cpu request" $values.autoscaling.hpa.target) }}{{ end -}}

{{- $cache := $values.modelCache -}}
{{- if and $cache.existingClaim (not $cache.enabled) }}{{ $wrong = append $wrong "modelCache.existingClaim: set modelCache.enabled" }}{{ end -}}
{{- if and $cache.enabled (has $cache.accessMode (list "ReadWriteOnce" "ReadWriteOncePod")) }}{{ $wrong = append $wrong (printf "modelCache.accessMode: %s serves the pods of one node; say ReadWriteMany, or disable the cache" $cache.accessMode) }}{{ end -}}
{{- if and $cache.enabled (eq $cache.accessMode "ReadOnlyMany") (or $cache.prefetch (not $cache.existingClaim)) }}{{ $wrong = append $wrong "modelCache.accessMode: into a claim of ReadOnlyMany nothing can be fetched; name an existingClaim that is filled, and set prefetch to false" }}{{ end -}}
{{- if and $cache.token.secret (not $cache.enabled) }}{{ $wrong = append $wrong "modelCache.token.secret: models are fetched by the cache's Job; set modelCache.enabled" }}{{ end -}}

{{- $mtls := $values.security.mtls -}}
{{- if and $mtls.certManager.enabled (not $mtls.enabled) }}{{ $wrong = append $wrong "security.mtls.certManager.enabled: set security.mtls.enabled too" }}{{ end -}}
{{- if and $mtls.certManager.enabled (not $mtls.certManager.issuer) }}{{ $wrong = append $wrong "security.mtls.certManager.issuer: who signs?" }}{{ end -}}
{{- if and $mtls.enabled (not $mtls.certManager.enabled) }}
{{- range $identity := concat (list "router" "gateway" "worker") (ternary (list "operator") list (ne (include "baton.hasPlacer" .) "")) }}
{{- if not (index $mtls.secrets $identity) }}{{ $wrong = append $wrong (printf "security.mtls.secrets.%s: name the Secret with tls.crt, tls.key and ca.crt for %s.%s, or enable certManager" $identity $identity $mtls.domain) }}{{ end -}}
{{- end }}
{{- end }}

{{- if and $values.gatewayApi.enabled (not $values.gatewayApi.parentRefs) }}{{ $wrong = append $wrong "gatewayApi.parentRefs: name the Gateway that the route belongs to" }}{{ end -}}
{{- if and $isRay (not $values.serviceAccount.create) (not $values.serviceAccount.name) }}{{ $wrong = append $wrong "serviceAccount.name: name the one to use, or set serviceAccount.create" }}{{ end -}}
{{- if and $values.ray.gcsFaultTolerance.passwordSecret (not $values.ray.gcsFaultTolerance.redis) }}{{ $wrong = append $wrong "ray.gcsFaultTolerance.passwordSecret: of which store? Set ray.gcsFaultTolerance.redis" }}{{ end -}}

{{- $owned := dict "gateway" (list "listen" "http_listen" "access" "tls" "processes") "router" (list "listen" "advertise" "http_listen" "mode" "fallback") "worker" (list "host" "port" "http_port" "advertise" "drain_s" "labels") "transfer" (list "backend" "fallback" "digest" "lease_s" "renew_s") "launcher" (list "kind" "ray" "kubernetes") "telemetry" (list "otlp_endpoint" "log_level") -}}
{{- range $section, $keys := $owned }}
{{- range $key := $keys }}
{{- $given := index $values.config $section | default dict -}}
{{- if not (kindIs "map" $given) }}{{ $wrong = append $wrong (printf "config.%s: must be a mapping" $section) }}
{{- else if hasKey $given $key }}{{ $wrong = append $wrong (printf "config.%s.%s: set by this chart; use the key of the chart" $section $key) }}{{ end -}}
{{- end }}
{{- end }}
{{- range $key := list "models" "security" "failpoints" }}
{{- if hasKey $values.config $key }}{{ $wrong = append $wrong (printf "config.%s: set by this chart; use the key of the chart" $key) }}{{ end -}}
{{- end }}
{{- if $wrong }}{{ fail (printf "values that cannot be:\n  %s" (join "\n  " (uniq $wrong))) }}{{ end -}}
{{- end }}
