#!/usr/bin/env bash
# Train on a standalone cluster with the driver on one of its machines, through the REST API of the master:
#
#     bash recipes/standalone/submit-rest.sh http://host:6066 spark://host:7077 /shared/environment/bin/python3 \
#         /shared/train.py [arguments of train.py]
#
# Both paths are those of the cluster's machines: unpack environment.tar.gz to a folder that all of them see. It waits for
# the driver, whose output is in the folder `work` of its worker.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: submit-rest.sh http://host:6066 spark://host:7077 PYTHON PROGRAM [arguments of the program]"
api=${1:?$usage} master=${2:?$usage} python=${3:?$usage} program=${4:?$usage}
shift 4

request=$(python3 - "$master" "$python" "${PROPERTIES:-$here/spark-defaults.conf}" "$program" "$@" <<'END'
import json
import os
import sys

master, python, properties, *program = sys.argv[1:]
settings = {"spark.master": master, "spark.submit.deployMode": "client", "spark.app.name": "sparkkeras"}
with open(properties) as file:
    settings |= dict(line.split(None, 1) for line in map(str.strip, file) if line and not line.startswith("#"))
variables = {"PYSPARK_PYTHON": python}
if "KERAS_BACKEND" in os.environ:
    variables["KERAS_BACKEND"] = os.environ["KERAS_BACKEND"]
print(
    json.dumps(
        {
            "action": "CreateSubmissionRequest",
            "appArgs": program,
            "appResource": "",
            "clientSparkVersion": "",
            "environmentVariables": variables,
            "mainClass": "org.apache.spark.deploy.SparkSubmit",
            "sparkProperties": settings,
        }
    )
)
END
)
field() {
    python3 -c 'import json, sys; text = sys.stdin.read(); print(json.loads(text).get(sys.argv[1], "") if text[:1] == "{" else "")' "$1"
}

driver=$(curl -sS -X POST --header 'Content-Type: application/json;charset=UTF-8' --data "$request" \
    "$api/v1/submissions/create" | field submissionId)
[ -n "$driver" ] || { echo "error: $api did not accept the driver" >&2 && exit 1; }
echo "$driver" # curl -X POST $api/v1/submissions/kill/$driver ends it
while :; do
    state=$(curl -sS "$api/v1/submissions/status/$driver" | field driverState)
    case $state in
    SUBMITTED | RUNNING | QUEUED | RELAUNCHING) sleep 2 ;;
    *) break ;;
    esac
done
echo "$state"
[ "$state" = FINISHED ]
