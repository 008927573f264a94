#!/bin/sh
# A cluster of containers on a real engine: build, up, two nodes of each role, a node killed, one
# paused, one disconnected, the router restarted, down. After each step it is asked for tokens, and
# must answer. COMPOSE_FILE may name other or more files, as compose itself reads it; with
# docker-compose.haproxy.yml among them, HAProxy is asked, and a router is killed too. BUILD= takes
# images that are there.
set -eu
cd "$(dirname "$0")"

if ! docker compose version > /dev/null 2>&1 || ! docker info > /dev/null 2>&1; then
    echo "skipped: no Docker engine with compose v2 here"
    exit 0
fi
: "${PDSERVE_CLUSTER_KEY:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}" "${BUILD=--build}"
export PDSERVE_CLUSTER_KEY PDSERVE_CPU_THREADS=1
url=http://127.0.0.1:8000
if docker compose config --services | grep -qx balancer; then
    url=http://balancer:8000
fi

finish() {
    code=$?
    [ "$code" -eq 0 ] || docker compose logs --tail 50
    docker compose down --volumes --timeout 5
    exit "$code"
}
trap finish EXIT

node() { # a role and a number: the container
    docker compose ps --all --quiet --status running --status paused "$1" | sed -n "${2}p"
}

# Waits until so many nodes are usable, then asks; a step's name is for the reader.
ask() {
    docker compose exec -T router python3 - "$url" "$1" "$2" << 'PYTHON'
import json
import sys
import time
import urllib.request

url, step, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])


def get(path, body=None):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, body and json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=120))


def ready():
    try:
        return sum(node["state"] == "ready" for node in get("/v1/cluster")["nodes"])
    except OSError:
        return 0


deadline = time.monotonic() + 120
while ready() < wanted:
    assert time.monotonic() < deadline, f"{step}: {ready()} of {wanted} nodes are ready"
    time.sleep(0.2)
begun = time.monotonic()
for count in range(4):
    prompt = f"{step} {count}: once upon a time"
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = get("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 8, answer
print(f"{step}: 4 answers in {time.monotonic() - begun:.1f} s", flush=True)
PYTHON
}

# shellcheck disable=SC2086  # BUILD is a flag or nothing
docker compose up $BUILD --detach --wait --wait-timeout 900
ask "1+1" 2

docker compose up --no-build --detach --wait --wait-timeout 300 --scale prefill=2 --scale decode=2
ask "2+2" 4

killed=$(node decode 1)
docker kill "$killed" > /dev/null
ask "a decode node killed" 3
docker start "$killed" > /dev/null
ask "started again" 4

paused=$(node prefill 1)
docker pause "$paused" > /dev/null
ask "a prefill node paused" 0
docker unpause "$paused" > /dev/null
ask "unpaused" 4

cut=$(node decode 2)
docker network disconnect pdserve-cluster "$cut"
ask "a decode node disconnected" 0
docker network connect pdserve-cluster "$cut"
ask "connected again" 4

docker compose restart router
ask "the router restarted" 4

# The first one is where the question is asked from.
second=$(node router 2)
if [ -n "$second" ]; then
    docker kill "$second" > /dev/null
    ask "a router killed" 4
    docker start "$second" > /dev/null
    ask "the router started again" 4
fi

# Containers end without a complaint: drained.
docker compose stop router
docker compose stop
for container in $(docker compose ps --all --quiet router prefill decode); do
    code=$(docker inspect --format '{{.State.ExitCode}}' "$container")
    echo "$(docker inspect --format '{{.Name}}' "$container") ended with exit code $code"
    [ "$code" -eq 0 ]
done
