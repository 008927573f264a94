#!/bin/sh
# Builds the images, brings a cluster of containers up, asks it something, drains it and looks at
# how each container ended. COMPOSE_FILE may name other or more files, as compose itself reads it.
set -eu
cd "$(dirname "$0")"

if ! docker compose version > /dev/null 2>&1 || ! docker info > /dev/null 2>&1; then
    echo "skipped: no Docker engine with compose v2 here"
    exit 0
fi

finish() {
    code=$?
    [ "$code" -eq 0 ] || docker compose logs --tail 50
    docker compose down --volumes --timeout 5
    exit "$code"
}
trap finish EXIT

docker compose up --build --detach --wait --wait-timeout 900
docker compose exec -T router python3 - << 'PYTHON'
import json
import urllib.request

body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request, timeout=120))
print("answer:", repr(answer["choices"][0]["text"]))
assert answer["usage"]["completion_tokens"] == 8, answer
PYTHON

docker compose stop router
docker compose stop
for service in router prefill decode; do
    code=$(docker inspect --format '{{.State.ExitCode}}' "$(docker compose ps --all --quiet $service)")
    echo "$service ended with exit code $code"
    [ "$code" -eq 0 ]
done
