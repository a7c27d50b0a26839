"""The manifests for Kubernetes: their fields are those of Kubernetes, and their command trains on two nodes."""

import copy
import subprocess
import sys

import pytest

from doc_blocks import HOUSE, SCRIPTS, environment, free_port
from lockstep.launch_contract import EXIT_NOT_SAVED, EXIT_STOPPED, EXIT_USAGE

yaml = pytest.importorskip("yaml")
SERVICE, JOB = yaml.safe_load_all((HOUSE / "examples/kubernetes/train.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
COMMAND = POD["containers"][0]["command"]
JOBSET = yaml.safe_load((HOUSE / "examples/kubernetes/jobset.yaml").read_text())


@pytest.mark.parametrize("document", [SERVICE, JOB], ids=lambda document: document["kind"])
def test_the_fields_are_those_of_kubernetes(document):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document | {"spec": document["spec"] | {"nodes": 2}}, "1.31", strict=True)


def test_the_fields_of_the_jobset_are_those_of_jobset():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read = models.JobsetV1alpha2JobSet.from_dict
    assert read(JOBSET).to_dict() == JOBSET, "a field that JobSet does not know is left out"
    assert read(JOBSET | {"nodes": 2}).to_dict() == JOBSET


def test_the_jobset_starts_the_pods_of_the_job_under_its_own_names():
    (nodes,) = JOBSET["spec"]["replicatedJobs"]
    expected = copy.deepcopy(JOB["spec"])
    del expected["template"]["spec"]["subdomain"]
    command = expected["template"]["spec"]["containers"][0]["command"]
    name = JOBSET["metadata"]["name"]
    command[command.index("--rdzv-endpoint=train-0.train:29400")] = (
        f"--rdzv-endpoint={name}-{nodes['name']}-0-0.{name}:29400"
    )
    assert nodes["template"]["spec"] == expected


def test_names_and_numbers_agree():
    name, spec = JOB["metadata"]["name"], JOB["spec"]
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-0.{POD['subdomain']}:29400" in COMMAND
    assert f"--nnodes={spec['completions']}" in COMMAND
    assert spec["completions"] == spec["parallelism"]
    assert {mount["name"] for mount in POD["containers"][0]["volumeMounts"]} == {v["name"] for v in POD["volumes"]}
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == [[EXIT_USAGE, EXIT_NOT_SAVED], [EXIT_STOPPED]]


@pytest.mark.campaign
@pytest.mark.long
def test_the_command_trains_on_two_nodes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPTS["train.py"].text)
    changed = {"train-0.train:29400": f"localhost:{free_port()}", "/runs/train": str(tmp_path / "runs")}
    words = list(COMMAND)
    for before, after in changed.items():
        words = [word.replace(before, after) for word in words]
    assert words[0] == "lockstep"
    command = [sys.executable, "-m", *words]
    nodes = [
        subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(JOB["spec"]["completions"])
    ]
    said = [node.communicate(timeout=100)[0].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert any("2 ranks on 2 nodes" in text for text in said), said
    assert any("accuracy 0.9" in text for text in said), said
