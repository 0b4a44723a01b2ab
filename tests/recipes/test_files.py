"""The files of the recipes: scripts and settings that can be read, names of settings that Spark knows, and their status."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
FOLDERS = sorted(path for path in RECIPES.iterdir() if path.is_dir() and path.name != "__pycache__")
SCRIPTS = sorted(RECIPES.rglob("*.sh"))
SETTINGS = re.compile(r"(?<![\w./])spark\.(?:archives|[A-Za-z]+\.[A-Za-z0-9_.-]*[A-Za-z0-9])(?![\w(])")
OF_OTHERS = {"spark.emr-serverless.", "spark.apache.org", "spark.sparkkeras."}
"""What begins like a setting and is none of Spark: settings of a vendor and of sparkkeras, and an address."""

BUILT = [
    r"spark\.(driver|executor|task|worker)\.resource\.gpu\.(amount|vendor|discoveryScript)",
    r"spark\.executorEnv\.\w+",
    r"spark\.kubernetes\.driverEnv\.\w+",
    r"spark\.yarn\.appMasterEnv\.\w+",
    r"spark\.kubernetes\.authenticate\.driver\.serviceAccountName",
    r"spark\.kubernetes\.executor\.volumes\.(emptyDir|persistentVolumeClaim)\.spark-local-dir-\d"
    r"\.(mount\.path|mount\.readOnly|options\.sizeLimit|options\.claimName)",
]
"""The settings whose names Spark puts together, from its documentation."""


def name_of(path):
    return str(path.relative_to(RECIPES))


def documents(path):
    """The documents of a YAML or JSON file."""
    return [json.loads(path.read_text())] if path.suffix == ".json" else list(yaml.safe_load_all(path.read_text()))


def kubernetes(kind):
    return [each for path in (RECIPES / "kubernetes").glob("*.yaml") for each in documents(path) if each["kind"] == kind]


@pytest.fixture(scope="module")
def known():
    """The names of settings in the class files of Spark."""
    names = set()
    for jar in (Path(pyspark.__file__).parent / "jars").glob("spark-*.jar"):
        if re.match(r"spark-(core|common-utils|network-common|sql-api|catalyst|connect|kubernetes|yarn)_", jar.name):
            with zipfile.ZipFile(jar) as classes:
                for name in classes.namelist():
                    if re.search(r"onf|onstants|package|Connect|Submit|Deploy|Resource", name):
                        names |= set(re.findall(rb"spark\.[A-Za-z0-9_.-]+", classes.read(name)))
    return {name.decode() for name in names}


def unknown(text, known):
    """The settings in a text that Spark does not know."""
    named = {name for name in SETTINGS.findall(text) if not name.startswith(tuple(OF_OTHERS))}
    named = {name for name in named if not any(re.fullmatch(pattern, name) for pattern in BUILT)}
    return sorted(named - known)


def test_spark_knows_the_settings_in_all_files(known):
    for path in sorted([*RECIPES.rglob("*.*"), ROOT / "docs" / "deployment.md"]):
        if path.suffix in {".md", ".sh", ".conf", ".json", ".yml", ".yaml", ".properties", ".ipynb", ".py"}:
            assert unknown(path.read_text(), known) == [], path


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_recipe_says_what_was_run_and_where_the_rest_comes_from(folder):
    readme = (folder / "README.md").read_text()
    status = readme.strip().split("\n\n")[-1]
    assert re.match(r"Run by the test suite|Not run: written from <https|Not built:", status), status
    assert "as of 2026-11" in status or folder.name == "notebook"
    for path in re.findall(r"`(tests/[\w/]+\.py)`", status):
        assert (ROOT / path).exists(), path
    for word in ("checkpoints", "gpus", "disk", "memory", *([] if folder.name == "notebook" else ["dynamic allocation"])):
        assert word in readme.lower(), word
    for page in (RECIPES / "README.md", ROOT / "docs" / "deployment.md"):
        assert f"{folder.name}/README.md" in page.read_text(), page


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_scripts_are_valid(script):
    subprocess.run(["bash", "-n", script], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker:
        done = subprocess.run([checker, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_dockerfile_passes_hadolint():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not linter:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, RECIPES / "docker" / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_the_program_where_the_settings_of_kubernetes_expect_it():
    dockerfile = (RECIPES / "docker" / "Dockerfile").read_text()
    assert "local:///opt/app/train.py" in (RECIPES / "kubernetes" / "submit.sh").read_text()
    assert "COPY recipes/train.py /opt/app/train.py" in dockerfile
    settings = (RECIPES / "kubernetes" / "spark-defaults.conf").read_text()
    assert set(re.findall(r"/opt/environment/bin/python3", settings)) <= set(re.findall(r"/opt/\S+/python3", dockerfile))


@pytest.mark.parametrize("name", ["*.yaml", "*.yml", "*.json", "*.ipynb"])
def test_files_of_structured_data_can_be_read(name):
    paths = sorted(RECIPES.rglob(name))
    assert paths
    for path in paths:
        assert all([json.loads(path.read_text())] if path.suffix == ".ipynb" else documents(path))


def test_objects_of_kubernetes_fit_together():
    (account,), (role,), (binding,) = kubernetes("ServiceAccount"), kubernetes("Role"), kubernetes("RoleBinding")
    (service,), (pod,), policies = kubernetes("Service"), kubernetes("Pod"), kubernetes("NetworkPolicy")
    settings = (RECIPES / "kubernetes" / "spark-defaults.conf").read_text()
    namespaces = {each["metadata"]["namespace"] for each in (account, role, binding, service, pod, *policies)}
    assert namespaces == set(re.findall(r"kubernetes\.namespace +(\w+)", settings))
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert {binding["subjects"][0]["name"], pod["spec"]["serviceAccountName"]} == {account["metadata"]["name"]}
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {port["port"] for port in service["spec"]["ports"]} >= set(map(int, re.findall(r"ort +(\d+)$", settings, re.M)))
    selected = {policy["spec"]["podSelector"]["matchLabels"]["spark-role"] for policy in policies}
    assert selected == {"driver", "executor"}


def test_all_workers_can_start_together():
    """All-reduce training and SparkRunner need it: no dynamic allocation, and no autoscaling."""
    for path in RECIPES.rglob("*"):
        if path.suffix in {".conf", ".properties"} or path.name in {"configurations.json", "serverless-job.json"}:
            assert re.search(r"spark\.dynamicAllocation\.enabled\W+false", path.read_text()), path
    (bundle,) = documents(RECIPES / "databricks" / "databricks.yml")
    (cluster,) = bundle["resources"]["jobs"]["train"]["job_clusters"]
    assert "autoscale" not in cluster["new_cluster"]
    assert cluster["new_cluster"]["num_workers"] == 2


def test_the_options_of_the_program_are_in_its_docstring_and_used_correctly():
    source = (RECIPES / "train.py").read_text()
    options = set(re.findall(r'"(--[a-z-]+)"', source))
    assert set(re.findall(r"--[a-z-]+", source.split("::\n\n", 1)[1].split("\n\n")[0])) == options
    (bundle,) = documents(RECIPES / "databricks" / "databricks.yml")
    given = bundle["resources"]["jobs"]["train"]["tasks"][0]["spark_python_task"]["parameters"]
    given = given + documents(RECIPES / "emr" / "serverless-job.json")[0]["sparkSubmit"]["entryPointArguments"]
    given = given + documents(RECIPES / "emr" / "steps.json")[0][0]["Args"][5:]
    assert {each for each in given if each.startswith("--")} <= options


def pack(*arguments, **variables):
    command = ["bash", str(RECIPES / "pack.sh"), *map(str, arguments)]
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_packing_explains_what_it_cannot_pack(tmp_path):
    assert "has to end in .tar.gz" in pack(tmp_path / "environment.zip").stderr
    assert "no-such-package is not installed in" in pack(tmp_path / "environment.tar.gz", "no-such-package").stderr
    system = tmp_path / "python3"
    system.write_text(f'#!/bin/sh\ncase "$2" in *base_prefix*) echo /usr ;; *) exec {sys.executable} "$@" ;; esac\n')
    system.chmod(0o755)
    done = pack(tmp_path / "environment.tar.gz", "numpy", PYTHON=str(system))
    assert "the Python in /usr cannot be moved" in done.stderr
    assert done.returncode == 1
    assert not (tmp_path / "environment.tar.gz").exists()
