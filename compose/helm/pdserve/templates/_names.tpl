{{/* The prefix of all names. */}}
{{- define "pdserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* Labels by which selectors find the pods of a component. Takes a dict of root and component. */}}
{{- define "pdserve.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of an object. Pods do not have the chart's version, else each one would restart them. */}}
{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "pdserve.secret" -}}
{{ .Values.keys.secret | default (printf "%s-keys" (include "pdserve.name" .)) }}
{{- end }}

{{/* Takes a dict of root and image, a key of `images`. */}}
{{- define "pdserve.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ get $images .image }}:{{ $images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Whether the model is one of the Hub, by its name. */}}
{{- define "pdserve.fromHub" -}}
{{- with .Values.model.path }}{{ if not (hasPrefix "/" .) }}true{{ end }}{{ end -}}
{{- end }}

{{- define "pdserve.modelPath" -}}
{{ .Values.model.path | default "/models/v1/SmolLM2-135M-Instruct" }}
{{- end }}
