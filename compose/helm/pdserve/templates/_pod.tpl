{{/* What the pods of all roles have in common. These take a dict of root, component (router,
prefill, decode, both) and role, the component's values. */}}

{{- define "pdserve.podMetadata" -}}
labels:
  {{- include "pdserve.selector" . | nindent 2 }}
  {{- with .role.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .role.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* enableServiceLinks: a Service named pdserve-… would set variables that look like options. */}}
{{- define "pdserve.podSpec" -}}
enableServiceLinks: false
automountServiceAccountToken: false
# Its first process reaps what ranks leave behind.
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
  {{- if include "pdserve.fromHub" .root }}
  # Its downloads are written to the volume.
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.role $field }}
{{ $field }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if not .root.Values.model.path }}
initContainers:
  - name: model
    image: {{ include "pdserve.image" (dict "root" .root "image" "node") }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    args: [model, {{ include "pdserve.modelPath" .root }}]
    env:
      - {name: PDSERVE_CACHE, value: /models}
    resources:
      requests: {cpu: "1", memory: 1Gi}
      limits: {memory: 2Gi}
    securityContext: {{ include "pdserve.securityContext" . | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
volumes:
  - name: models
    {{- toYaml (.root.Values.model.volume | default (dict "emptyDir" dict)) | nindent 4 }}
  - name: tmp
    emptyDir: {}
  {{- range $use, $name := .root.Values.tls }}
  {{- if and $name (or (eq $use "roles") (eq $.component "router")) }}
  - name: tls-{{ $use }}
    secret: {secretName: {{ $name }}, defaultMode: 0444}
  {{- end }}
  {{- end }}
  {{- with .root.Values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "pdserve.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pdserve.mounts" -}}
- {name: models, mountPath: /models, readOnly: {{ not (include "pdserve.fromHub" .root) }}}
- {name: tmp, mountPath: /tmp}
{{- range $use, $name := .root.Values.tls }}
{{- if and $name (or (eq $use "roles") (eq $.component "router")) }}
- {name: tls-{{ $use }}, mountPath: /etc/pdserve/{{ $use }}, readOnly: true}
{{- end }}
{{- end }}
{{- with .root.Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Options of every role. Those of the values come last, so that they win. */}}
{{- define "pdserve.args" -}}
- --model={{ include "pdserve.modelPath" .root }}
{{- with .root.Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
- --host=0.0.0.0
- --drain-timeout={{ .root.Values.drainTimeout }}
{{- if .root.Values.tls.roles }}
- --tls-cert=/etc/pdserve/roles/tls.crt
- --tls-key=/etc/pdserve/roles/tls.key
- --tls-ca=/etc/pdserve/roles/ca.crt
{{- end }}
{{- range concat .root.Values.args .role.args }}
- {{ quote . }}
{{- end }}
{{- end }}

{{- define "pdserve.env" -}}
- name: PDSERVE_CLUSTER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "pdserve.secret" .root }}, key: cluster-key}}
{{- if include "pdserve.fromHub" .root }}
- {name: HF_HOME, value: /models}
{{- with .root.Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end }}
{{- with concat .root.Values.env .role.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Keys of clients and operators. */}}
{{- define "pdserve.clientKeys" -}}
{{- if .Values.keys.clients }}
- name: PDSERVE_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "pdserve.secret" . }}, key: api-key}}
- name: PDSERVE_ADMIN_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "pdserve.secret" . }}, key: admin-api-key}}
{{- end }}
{{- end }}
