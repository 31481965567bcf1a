"""One experiment by two processes of four devices each, also when one is killed."""

import json
import socket
from collections import Counter

import pytest
import thorough
from distributed_child import Child
from jax._src.clusters import cloud_tpu_cluster

from golden_scores import labelled
from jaxhal import experiments
from jaxhal.experiments import distributed
from tiny_lm import write_lm

CONFIG = {
    "name": "mine",
    "data": [{"name": "in.jsonl"}],
    "detectors": [
        "mtop_div",
        {"predictive_entropy": {"draw": {"n": 2, "max_new_tokens": 4}}},
    ],
    "protocol": "holdout",
    "model": "model",
    "mesh": "data=2,model=2",
    "batch_size": 4,
    "store": "store",
}
VARIABLES = distributed._ADDRESS, distributed._COUNT, distributed._NUMBER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("distributed")
    write_lm(made / "model")
    rows = (f"{json.dumps(row)}\n" for row in labelled(24))
    (made / "in.jsonl").write_text("".join(rows), "utf-8")
    (made / "config.yaml").write_text(json.dumps(CONFIG), "utf-8")
    return made


def job(count=2):
    """Variables of each process of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        dict(zip(VARIABLES, (address, str(count), str(number)), strict=True))
        for number in range(count)
    ]


def table(folder):
    return json.loads((folder / "mine" / "results.json").read_text("utf-8"))["rows"]


def test_two_processes_do_what_one_does_also_when_one_is_killed(folder):
    code, alone, said = Child(["run", "config.yaml"], folder).ended()
    assert code == 0, said
    assert {kind for kind, _ in alone} == {"drew", "read"}

    command = ["run", "config.yaml", "--distributed", "store=both", "out=together"]
    places = job()
    first, second = (Child(command, folder, place) for place in places)
    did = [[child.says()] for child in (first, second)]
    assert {kind for kind, _ in sum(did, [])} == {"drew"}
    for child in (first, second):
        child.line.send("go")
    did[0].append(first.says())  # holds a part from here on
    did[1].append(second.says())
    second.line.send("go")
    lost = second.says()
    assert lost[0] == "read"
    second.process.kill()
    code, rest, _ = second.ended()
    assert code < 0 and not rest

    again = Child(command, folder, places[1])
    assert again.says() == lost  # and nothing before it
    for child in (first, again):
        child.line.send("go on alone")
    code, rest, said = again.ended()
    assert code == 0 and "process 1 of 2: " in said and " answers read" in said, said
    did[1] += [lost, *rest]
    code, rest, said = first.ended()
    assert code == 0 and "written to together/mine" in said, said
    did[0] += rest
    for some in did:
        assert {kind for kind, _ in some} == {"drew", "read"}
    counts = Counter(sum(did, []))
    assert set(counts) == set(alone) and set(counts.values()) == {1}
    assert table(folder / "together") == table(folder / "runs")
    assert not list((folder / "both").glob(".*"))


def shared(first, second):
    """What two did that go on from the first part of each, and end well."""
    did = [[child.says()] for child in (first, second)]
    assert did[0] != did[1]
    for child in (first, second):
        child.line.send("go on alone")
    for one, child in zip(did, (first, second), strict=True):
        code, rest, said = child.ended()
        assert code == 0, said
        one += rest
    return Counter(sum(did, []))


@thorough.mark
def test_where_all_were_killed_nothing_done_is_done_again(folder):
    command = ["run", "config.yaml", "--distributed", "store=anew", "out=anew"]
    both = [Child(command, folder, place) for place in job()]
    done = [child.says() for child in both]
    for child in both:
        child.line.send("go")
    held = [child.says() for child in both]
    for child in both:
        child.process.kill()
        code, rest, _ = child.ended()
        assert code < 0 and not rest
    counts = shared(*(Child(command, folder, place) for place in job()))
    assert set(held) <= set(counts) and not set(done) & set(counts)
    assert set(counts.values()) == {1}


def test_slurm_tells_the_processes_of_each_other(folder):
    """As ``srun --ntasks=2`` starts them; JAX finds host and port in its variables."""
    number = int(job()[0][distributed._ADDRESS].rpartition(":")[2])
    slurm = {
        "SLURM_JOB_ID": str(number),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
    }
    command = ["run", "config.yaml", "--distributed", "store=slurm", "out=slurmed"]
    places = [
        slurm | {"SLURM_PROCID": number, "SLURM_LOCALID": number} for number in "01"
    ]
    counts = shared(*(Child(command, folder, place) for place in places))
    assert set(counts.values()) == {1}
    assert table(folder / "slurmed") == table(folder / "runs")


def test_gke_tells_a_worker_of_a_slice_who_it_is(monkeypatch):
    """By the variables of its container, which JAX looks up on machines with TPUs."""
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    address = job()[0][distributed._ADDRESS]
    monkeypatch.setattr(cloud_tpu_cluster, "coordinator_port", address.split(":")[1])
    for name in (*VARIABLES, "TPU_PROCESS_ADDRESSES"):
        monkeypatch.delenv(name, raising=False)
    gke = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    # Nothing is asked of a service that a container has.
    slices = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES")
    gke |= dict.fromkeys((*slices, "MEGASCALE_SLICE_ID"), "")
    for name, value in (gke | {"TPU_SKIP_MDS_QUERY": "1"}).items():
        monkeypatch.setenv(name, value)
    state = distributed._connected()
    try:
        assert (state.process_id, state.num_processes) == (0, 1)
        assert state.coordinator_address == address.replace("127.0.0.1", "localhost")
    finally:
        state.shutdown()


@thorough.mark
def test_runs_that_know_nothing_of_each_other_share_a_store(folder):
    command = ["run", "config.yaml", "store=known"]
    waits = {"JAXHAL_TESTS": "1"}  # which says nothing but that it is told to go on
    each = (Child([*command, f"out={out}"], folder, waits) for out in ("a", "b"))
    counts = shared(*each)
    assert set(counts.values()) == {1}
    assert table(folder / "a") == table(folder / "b") == table(folder / "runs")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("seed=1", "data.0.sources=7"),
            "the processes disagree: data.0.sources is null in process 0 and 7 in "
            "process 1; seed is 0 in process 0 and 1 in process 1; start all of them "
            "with the same configuration",
        ),
        (("store=elsewhere",), "elsewhere of process 1 is not that of process 0"),
    ],
)
def test_processes_that_would_not_do_the_same(folder, settings, message):
    command = ["run", "config.yaml", "--distributed", "out=none"]
    each = zip(((), settings), job(), strict=True)
    for child in [Child([*command, *some], folder, place) for some, place in each]:
        code, did, said = child.ended()
        assert code == 2 and not did and message in said, said
    assert not (folder / "none").exists()


def test_others_that_do_not_come(folder):
    command = ["run", "config.yaml", "--distributed", "out=none"]
    code, did, said = Child(command, folder, job()[1], seconds=1).ended()
    assert code == 2 and not did, said
    assert "process 1 waited 1 seconds for the others at 127.0.0.1:" in said


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ((None, None, None), "no job of several processes is known here: coordinator_"),
        (("here", "2", "0"), "JAX_COORDINATOR_ADDRESS is 'here'; give HOST:PORT"),
        (("here:80", "two", "0"), "JAX_NUM_PROCESSES is 'two'; give a number"),
        (("here:80", "2", "-1"), "JAX_PROCESS_ID is '-1'; give a number"),
        (("here:80", "2", "2"), "no job .*Got process_id=2, num_processes=2"),
        (("here:80", "2", None), "no job .*The process id of the current process must"),
    ],
)
def test_no_job(folder, monkeypatch, variables, message):
    monkeypatch.chdir(folder)
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(VARIABLES, variables, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        experiments.run_distributed("config.yaml")
