"""`${env:NAME}` and its kind: where they may stand, what they become, and that secrets stay out of everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.compiler.launch_folder import launch_files
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.drift import compare
from elasticflow.compiler.provenance.job_json import job_from_json, job_to_json
from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.render_text import FORMATS, render
from elasticflow.jobfile.load import load_job, require_cases, require_job
from elasticflow.jobfile.tables.notify import looked_up
from elasticflow.jobfile.tables.types import CollateTable
from elasticflow.jobfile.type_checks.annotations import DatasetValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.jobfile.tables.job import Job

BASE = Path(__file__).parents[1] / "gallery" / "jobs" / "good_base.toml"
PASSWORD = "hunter2-" * 3


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a file which extends a good job, and returns its name."""

    def write(lines: str) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(f"extends = {json.dumps(str(BASE))}\n{lines}", "utf-8")
        return path

    return write


def resolved(path: Path, **environment: str) -> Job:
    """Return the job, variables looked up."""
    job = require_job(path, environment=environment).job
    assert job is not None
    return job


def test_references_become_what_they_stand_for(written: Callable[[str], Path]) -> None:
    """Several in one text, in nested values, with a default, and escaped."""
    path = written(
        """
        [dataset.args]
        root = "${env:ROOT}/images"
        parts = ["${env:PART:-all}", { of = "$${env:NOT} ${job.seed}" }]
        [nodes]
        endpoint = "${env:HEAD}:${env:PORT:-29400}"
        [snapshots]
        uri = "s3://${env:BUCKET}/${job.name}"
        [model]
        args = { template = "$${name} costs $5 {x}" }
        """
    )
    job = resolved(path, ROOT="/data", HEAD="10.0.0.1", BUCKET="b", PART="")
    expected = {"split": "train", "root": "/data/images", "parts": ["all", {"of": "${env:NOT} 0"}]}
    assert expected == job.dataset.args
    assert ("10.0.0.1:29400", "s3://b/shop") == (job.nodes.endpoint, job.snapshots.uri)
    assert {"template": "${name} costs $5 {x}"} == job.model.args


def test_references_know_the_case(written: Callable[[str], Path]) -> None:
    """A case's name, and its job's own name and seed."""
    path = written(
        '[snapshots]\nuri = "s3://b/${matrix.case}/${job.name}/${job.seed}"\n[matrix.axes]\njob.seed = [1, 2]\n'
    )
    jobs = [each.job for each in require_cases(path)]
    assert ["s3://b/seed1/shop-seed1/1", "s3://b/seed2/shop-seed2/2"] == [job.snapshots.uri for job in jobs]


def test_what_is_looked_up_is_checked_like_the_rest(written: Callable[[str], Path]) -> None:
    """The excerpt shows the file's own text."""
    path = written('[nodes]\nendpoint = "${env:HEAD}"\n')
    with pytest.raises(JobRefusedError) as caught:
        resolved(path, HEAD="no port")
    assert 'nodes.endpoint must be "host:port", like "head:29400", not "no port"' in caught.value.message
    assert '3 | endpoint = "${env:HEAD}"' in caught.value.message


def test_a_variable_that_is_not_set_is_an_error_only_where_it_is_needed(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`validate` looks nothing up, so a file is validated alike on every machine: a note tells of it."""
    path = written('[nodes]\nmax = 2\nendpoint = "${env:HEAD}:1"\n[snapshots]\nuri = "${env:WHERE}"\n')
    monkeypatch.setenv("HEAD", "not looked at")
    loaded = load_job(path)
    assert ["note", "note"] == [each.severity for each in loaded.diagnostics if each.code == codes.NOT_SET]
    assert {"note"} == {each.severity for each in loaded.diagnostics}
    with pytest.raises(JobRefusedError) as caught:
        resolved(path, HEAD="head")
    assert "error[EF008]: the variable WHERE is not set, and snapshots.uri needs it" in caught.value.message
    assert "set it, or give a default: ${env:WHERE:-default}" in caught.value.message
    assert "HEAD" not in caught.value.message


def test_references_come_from_flags_too(written: Callable[[str], Path]) -> None:
    """They stand in a flag as in the file, and errors point at the flag."""
    job = require_job(written(""), ["snapshots.uri=s3://${env:B}/x"], environment={"B": "b"}).job
    assert job is not None
    assert job.snapshots.uri == "s3://b/x"
    found = next(
        each for each in load_job(written(""), ["model.args.name=${env:B}"]).diagnostics if each.help
    )
    assert (codes.NO_REFERENCE_HERE, "--set", 17) == (found.code, found.file, found.column)


SECRETS = """
[snapshots]
uri = "sftp://me:${env:SFTP_PASSWORD}@host/runs"
options = { secret = "${env:S3_SECRET}", client_kwargs = { token = "${env:PLAIN}", region = "eu" } }
"""
VARIABLES = {"SFTP_PASSWORD": PASSWORD, "S3_SECRET": f"{PASSWORD}2", "PLAIN": f"{PASSWORD}3"}


def test_secrets_reach_the_file_system_and_nothing_else(written: Callable[[str], Path]) -> None:
    """They are in the job, and in no file of the launch folder, no public plan and no digest."""
    path = written(SECRETS)
    assert [] == [each for each in load_job(path).diagnostics if each.severity != "note"]
    loaded = require_job(path, environment=VARIABLES)
    job = loaded.job
    assert job is not None
    assert job.snapshots.uri == f"sftp://me:{PASSWORD}@host/runs"
    assert job.snapshots.options["client_kwargs"] == {"token": f"{PASSWORD}3", "region": "eu"}
    plan = plan_job(job, project_root=loaded.project_root, job_files=loaded.files)
    files = launch_files(plan, job, path.parent / "launch", project_root=loaded.project_root)
    assert PASSWORD not in "".join(files.values())
    assert '"sftp://me:" + os.environ["SFTP_PASSWORD"] + "@host/runs"' in files["train.py"]
    assert '"secret": os.environ["S3_SECRET"]' in files["train.py"]
    compile(files["train.py"], "train.py", "exec")
    assert PASSWORD not in plan.public().model_dump_json()
    other = resolved(path, **{name: f"x{value}" for name, value in VARIABLES.items()})
    assert (
        plan.job_digest
        == plan_job(other, project_root=loaded.project_root, job_files=loaded.files).job_digest
    )


VARIABLES_OF_WORKERS = """
[env]
HF_HOME = "${env:HOME}/hf"
HF_TOKEN = "${env:PLAIN}"
LICENSE = { value = "key ${env:PLAIN}" }
MAX_TOKENS = { value = "512", secret = false }
"""


def test_secret_variables_reach_the_workers_and_no_record(written: Callable[[str], Path]) -> None:
    """A name that looks secret, or is declared so, is in the plan that starts workers; records know that it is there."""
    path = written(VARIABLES_OF_WORKERS)
    environment = {"HOME": "/home/me", "PLAIN": PASSWORD}
    loaded = require_job(path, environment=environment)
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    assert plan.env == {
        "HF_HOME": "/home/me/hf",
        "HF_TOKEN": PASSWORD,
        "LICENSE": f"key {PASSWORD}",
        "MAX_TOKENS": "512",
    }
    assert plan.env_secrets == ("HF_TOKEN", "LICENSE")
    public = plan.public()
    assert public.env == {"HF_HOME": "/home/me/hf", "MAX_TOKENS": "512"}
    assert type(plan).model_validate_json(public.model_dump_json()) == public
    files = launch_files(plan, loaded.job, path.parent / "launch", project_root=loaded.project_root)
    assert PASSWORD not in "".join(files.values())
    assert 'export LICENSE="${LICENSE:?' in files["torchrun.sh"]
    other = resolved(path, **{**environment, "PLAIN": "something else"})
    again = plan_job(other, project_root=loaded.project_root, job_files=loaded.files)
    assert plan.job_digest == again.job_digest


def test_secret_in_another_variable_has_to_be_declared(written: Callable[[str], Path]) -> None:
    """Its name does not say so, and records would hold it."""
    path = written('[env]\nACCOUNT = "${env:HF_TOKEN}"\n')
    [found] = [each for each in load_job(path).diagnostics if each.severity == "error"]
    assert found.code == codes.SECRET_RECORDED
    assert found.help == 'say that it is one: ACCOUNT = { value = "${env:HF_TOKEN}", secret = true }'


@pytest.mark.parametrize(
    ("lines", "environment"),
    [
        ('[snapshots]\noptions = { secret = "${env:S}", every = 1 }\nevery = "5"\n', {"S": PASSWORD}),
        ('[snapshots]\nuri = "memory://u:${env:S_TOKEN}@h/${env:X}"\n', {"S_TOKEN": PASSWORD, "X": "x"}),
        ('[snapshots]\nuri = "s3://u:${env:S_TOKEN}@h/x"\n', {"S_TOKEN": f"a/{PASSWORD}"}),
        (
            '[nodes]\nmax = 2\nendpoint = "h:1"\n[snapshots]\nuri = "file://u:${env:S_TOKEN}@h"\n[ddp]\nx = 0\n',
            {"S_TOKEN": PASSWORD * 9},
        ),
        ('[snapshots]\nuri = "s3://u:${env:S_TOKEN}@h/x"\n', {"S_TOKEN": f"a@{PASSWORD}"}),
    ],
)
def test_no_message_shows_a_secret(
    written: Callable[[str], Path], lines: str, environment: Mapping[str, str]
) -> None:
    """In no format, whatever else is wrong with its table; one that would leave its place in a URL is refused."""
    loaded = load_job(written(lines), environment=environment)
    assert loaded.has_errors
    for style in FORMATS:
        assert PASSWORD[:8] not in render(loaded.diagnostics, style)  # type: ignore[arg-type]  # a tuple of the literals


@pytest.mark.parametrize(
    "line",
    [
        'dataset.args.token = "${env:PLAIN}"',
        'dataset.args.x = "${env:API_KEY}"',
        'evaluation = { entry = "shop:Images", args = { auth = ["${env:MY_PASSWORD}"] } }',
        'snapshots.uri = "s3://${env:MY_SECRET}/x"',
        'snapshots.options.region = "${env:MY_SECRET}"',
    ],
)
def test_secrets_are_refused_where_they_would_be_recorded(written: Callable[[str], Path], line: str) -> None:
    """By the variable's name or the key's, and without looking them up."""
    for environment in (None, dict.fromkeys(("PLAIN", "API_KEY", "MY_PASSWORD", "MY_SECRET"), PASSWORD)):
        found = load_job(written(line), environment=environment).diagnostics
        assert [codes.SECRET_RECORDED] == [each.code for each in found if each.severity == "error"]
        assert PASSWORD not in render(found)


def test_a_value_from_the_environment_is_part_of_the_job(written: Callable[[str], Path]) -> None:
    """With another value it is another job, which resuming with a run tells; the text in `sources` is as written."""
    path = written('[dataset]\nargs = { split = "train", root = "${env:ROOT}" }\n')
    loaded = require_job(path, environment={"ROOT": "/data"})
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    files = launch_files(plan, loaded.job, path.parent / "launch", project_root=loaded.project_root)
    assert '"/data"' in files["train.py"]
    assert '"${env:ROOT}"' in "".join(text for name, text in files.items() if name.startswith("sources/"))
    other = resolved(path, ROOT="/scratch")
    (difference,) = compare(loaded.job, other)
    assert ("dataset.args.root", "/data", "/scratch") == (difference.key, difference.old, difference.new)
    assert (difference.weight, "fingerprint" in difference.reason) == ("trajectory", True)
    assert (
        plan.job_digest
        != plan_job(other, project_root=loaded.project_root, job_files=loaded.files).job_digest
    )


def test_values_of_the_data_are_told_from_texts(written: Callable[[str], Path]) -> None:
    """As a whole argument of what is made once the data is open, also inside objects, lists and groups."""
    path = written(
        """
        [model.args]
        width = "${dataset.width}"
        config = { entry = "builtins:dict", args = { sizes = ["${dataset.tokenizer.size}", "$${dataset.width}"] } }
        [optimizer]
        groups = [{ ndim = 1, args = { lr = "${dataset.rate}" } }]
        [dataset.collate]
        entry = "shop:padded"
        args = { padding = "${dataset.padding}" }
        """
    )
    job = load_job(path, environment={}).valid_job or require_job(path).job
    assert job is not None
    assert job.model.args["width"] == DatasetValue("width")
    assert job.model.args["config"]["args"]["sizes"] == [DatasetValue("tokenizer.size"), "${dataset.width}"]
    assert job.optimizer.groups[0].args == {"lr": DatasetValue("rate")}
    assert isinstance(job.dataset.collate, CollateTable)
    assert job.dataset.collate.args == {"padding": DatasetValue("padding")}


REFUSED = [
    ('[dataset.args]\nroot = "${dataset.root}"', "dataset.args.root is what the data is opened with"),
    ('[model.args]\nwidth = "w${dataset.width}"', "as a whole only"),
    ('[model.args]\nwidth = "${dataset.width}${dataset.width}"', "as a whole only"),
    ('[job]\nname = "${dataset.name}"', "job.name takes no values of the data"),
    ('[optimizer]\ngroups = [{ match = "${dataset.glob}" }]', "takes no values of the data"),
    ('[dataset]\nshards = 2\n[model.args]\nwidth = "${dataset.width}"', "shard by shard"),
    ('[model.args]\nwidth = "${dataset.1}"', "model.args.width takes no references"),
]


@pytest.mark.parametrize(("lines", "message"), REFUSED)
def test_values_of_the_data_are_refused_where_they_cannot_be(
    written: Callable[[str], Path], lines: str, message: str
) -> None:
    """Before the data is open, inside a text, in other keys, and for data that is opened shard by shard."""
    found = [each for each in load_job(written(lines)).diagnostics if each.code == codes.NO_REFERENCE_HERE]
    assert [message in each.message for each in found] == [True]


def test_the_address_of_a_webhook_stays_in_the_environment(written: Callable[[str], Path]) -> None:
    """Where the job runs it is checked, and the job holds the reference; where it does not, that is no mistake of the file."""
    path = written('[notify]\nurl = "${env:HOOK}/${job.name}/${env:PART:-x}"\n')
    secret = "https://chat.example.org/s3cr3t"
    loaded = load_job(path, environment={"HOOK": secret})
    assert loaded.job.notify is not None
    assert loaded.job.notify.url == "${env:HOOK}/shop/${env:PART:-x}"
    assert loaded.job.notify.variables() == {"HOOK", "PART"}
    assert f"{secret}/shop/x" == looked_up(loaded.job.notify.url, {"HOOK": secret})
    assert job_from_json(job_to_json(loaded.job)).notify == loaded.job.notify
    assert not [each for each in load_job(path).diagnostics if each.severity != "note"]
    for value in (None, "", "s3cr3t"):
        found = load_job(path, environment={} if value is None else {"HOOK": value}).diagnostics
        (problem,) = [each for each in found if each.severity == "error"]
        assert "HOOK" in problem.message
        assert "s3cr3t" not in f"{problem.message} {problem.help}"
