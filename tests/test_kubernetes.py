"""The Kubernetes manifest against Kubeflow Trainer's published schema, and its command as two processes here."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT, TINY, Result, environment, free_port, llmexp

FRESH_PROCESSES = True  # they get limits, a control group and signals of their own

MODELS = {
    "trainer.kubeflow.org/v1alpha1 TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
    "v1 PersistentVolumeClaim": "io_k8s_api_core_v1_persistent_volume_claim.IoK8sApiCoreV1PersistentVolumeClaim",
    "v1 Pod": "io_k8s_api_core_v1_pod.IoK8sApiCoreV1Pod",
}
PAGE = (ROOT / "docs/kubernetes.md").read_text()
JOB = yaml.safe_load((ROOT / "launchers/kubernetes.yaml").read_text())
CLAIM, DESK = yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
TRAINER = JOB["spec"]["trainer"]
NODE = JOB["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
POD = NODE["template"]["spec"]["template"]["spec"]
KeyPath = tuple[str | int, ...]
# So slow that it is far from its end however late it is stopped.
SLOW = """import os, time
def wait(event, context):
    time.sleep(float(os.environ["SLOW"]) if event == "step_start" else 0)
"""


def refused(tree: dict[str, Any]) -> str:
    """What the schema has against an object, or the empty string."""
    what = f"{tree.get('apiVersion')} {tree.get('kind')}"
    if (name := MODELS.get(what)) is None:
        return f"no such kind: {what}"
    module, _, kind = name.partition(".")
    model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), kind)
    try:
        read = model.from_dict(tree).to_dict()
    except (ValueError, TypeError, AttributeError) as error:  # the generated readers trip over some wrong types
        return repr(error)
    # The models leave out what they do not know, so what came back tells.
    return "" if read == tree else f"unknown keys: understood was only {read}"


def nodes(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value below a tree, with the keys and indices that lead to it."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key), value
        yield from nodes(value, (*path, key))


def parent(tree: Any, path: KeyPath) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def test_objects_agree_with_the_schema() -> None:
    for tree in (JOB, CLAIM, DESK):
        assert not refused(tree), refused(tree)


def test_every_misspelt_key_and_wrong_type_is_refused() -> None:
    """The check can fail: everywhere, not only where somebody thought of it."""
    for tree in (JOB, CLAIM, DESK):
        for path, value in nodes(tree):
            key = path[-1]
            if isinstance(key, str) and path[-2:-1] not in [("limits",), ("requests",)]:  # whose keys are free
                wrong = copy.deepcopy(tree)
                there = parent(wrong, path)
                there[key + "s"] = there.pop(key)
                assert refused(wrong), f"misspelt {path}"
            wrong = copy.deepcopy(tree)
            parent(wrong, path)[key] = "x" if isinstance(value, dict | list) else {"x": [1]}
            assert refused(wrong), f"wrong type of {path}"
    for what in ("runtimeRef", "trainer"):  # one is required, the other is not
        wrong = copy.deepcopy(JOB)
        del wrong["spec"][what]
        assert bool(refused(wrong)) == (what == "runtimeRef")


def test_what_has_to_match_matches() -> None:
    run_dir, env = TRAINER["command"][-1], {e["name"]: e for e in TRAINER["env"]}
    (queue,) = re.findall(r"^kubectl exec .* -- (llmexp train --queue .*)$", PAGE, re.MULTILINE)
    said = dict(word.split("=", 1) for word in shlex.split(queue) if "=" in word)
    assert int(said["parallelism.nnodes"]) == TRAINER["numNodes"]
    assert int(said["parallelism.nproc_per_node"]) == TRAINER["numProcPerNode"]
    assert said["hydra.run.dir"] == run_dir

    limits, ranks = TRAINER["resourcesPerNode"]["limits"], TRAINER["numProcPerNode"]
    assert limits["nvidia.com/gpu"] == ranks
    assert int(env["OMP_NUM_THREADS"]["value"]) * ranks == limits["cpu"]
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]) < POD["terminationGracePeriodSeconds"]

    (container,), (desk,) = POD["containers"], DESK["spec"]["containers"]
    assert NODE["name"] == container["name"] == "node"  # what Trainer's runtimes call both
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounts.keys() == {v["name"] for v in POD["volumes"]}
    volume = next(v for v in POD["volumes"] if "persistentVolumeClaim" in v)
    assert volume in DESK["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert desk["volumeMounts"] == [{"name": volume["name"], "mountPath": mounts[volume["name"]]}]
    for path in (run_dir, env["LLMEXP_CACHE_DIR"]["value"]):
        assert Path(path).is_relative_to(mounts[volume["name"]])
    assert {"name": "LLMEXP_CACHE_DIR", "value": env["LLMEXP_CACHE_DIR"]["value"]} in desk["env"]
    assert desk["image"] == TRAINER["image"]
    assert f"exec -it {DESK['metadata']['name']} " in PAGE
    name = JOB["metadata"]["name"]
    assert f"jobset-name={name}," in PAGE
    assert f"kubectl delete trainjob {name}`" in PAGE


def test_what_the_schema_does_not_say() -> None:
    env = {e["name"]: e for e in TRAINER["env"]}
    assert len(env) == len(TRAINER["env"])  # a list that Kubernetes keeps by name
    assert not [name for name in env if name.startswith("PET_")]  # Trainer's own, and refused
    key = env.pop("WANDB_API_KEY")["valueFrom"]["secretKeyRef"]
    assert f"kubectl create secret generic {key['name']} " in PAGE
    assert not [name for name in env if re.search("KEY|TOKEN|SECRET|PASSWORD", name)]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", JOB["metadata"]["name"])  # becomes the pods' host names
    storage = CLAIM["spec"]["resources"]["requests"]["storage"]
    for quantity in (*TRAINER["resourcesPerNode"]["limits"].values(), storage):
        assert re.fullmatch(r"\d+([kMGTPE]|[KMGTPE]i)?", str(quantity))
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_page_names_the_schema_version() -> None:
    (version,) = re.findall(r"^kubeflow[-_]trainer[-_]api==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"(package\nkubeflow-trainer-api {version})" in PAGE or f"(package kubeflow-trainer-api {version})" in PAGE


def pods(run: Result, port: int, slow: float) -> list[subprocess.Popen[str]]:
    """The manifest's command and variables on two nodes of one rank, with what Trainer adds; `slow`: seconds a step."""
    own = {e["name"]: e["value"] for e in TRAINER["env"] if "value" in e}
    command = [run.folder if word == TRAINER["command"][-1] else word for word in TRAINER["command"]]
    assert command[0] == "torchrun"
    trainer = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    path = os.pathsep.join(map(str, (ROOT, run.folder.parent)))
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "LLMEXP_ALLOW": "slow", "SLOW": str(slow)}
    cache = environment()["LLMEXP_CACHE_DIR"]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *map(str, command[1:])],
            env={**environment(), **own, **here, "LLMEXP_CACHE_DIR": cache}
            | {k: str(v) for k, v in trainer.items()} | {"PET_NODE_RANK": str(rank)},
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip


def test_a_stopped_pod_stops_all_and_the_same_command_goes_on(tmp_path: Path) -> None:
    steps = 150
    (tmp_path / "slow.py").write_text(SLOW)
    run = llmexp(
        "train", "--queue", *TINY, "data=synthetic", "data.n_tokens=100000", "parallelism=fsdp", "parallelism.nnodes=2",
        "parallelism.nproc_per_node=1", f"train.max_steps={steps}", "train.log_every=1", "train.eval_every=null",
        "--allow", "slow", "hooks=[slow.wait]", "hydra.run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert run.code == 0, run.err
    metrics, both = run.folder / "metrics.jsonl", pods(run, free_port(), slow=0.3)
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(run.rows()) < 3:
            assert time.monotonic() < deadline
            assert [p.poll() for p in both] == [None, None]
            time.sleep(0.1)
        os.kill(both[1].pid, signal.SIGTERM)  # as the kubelet does: only the container's first process
        errors = [p.communicate(timeout=60)[1] for p in both]
        status = run.json("status.json")
        assert (status["state"], status["exit_code"]) == ("preempted", 75), errors
        stopped = status["summary"]["steps"]
        assert 3 <= stopped < steps
        assert run.checkpoint(stopped).is_dir()
        assert [p.returncode for p in both] == [1, 1], errors  # not 0: the pods have to be started again

        both = pods(run, free_port(), slow=0)
        errors = [p.communicate(timeout=60)[1] for p in both]
        assert [p.returncode for p in both] == [0, 0], errors
    finally:
        for p in both:
            p.kill()  # the ranks end with their parent
            p.wait()
    assert run.json("status.json")["state"] == "finished"
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    assert f"step_{stopped:08d}" in (run.folder / "train.log").read_text()
