"""Tasks for a shell, and task folders of Harbor, in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.components import ENVIRONMENT
from rlflow.environment import Environment
from rlflow.errors import ConfigError, DataError
from rlflow.types import Step
from rlflow_environments.sandboxed.folders import files_of_tests, read_folders
from rlflow_environments.sandboxed.harbor import HarborError

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed"
)
FORKS = "for n in $(seq 99); do sleep 9 & done; wait"
TEST_SH = """#!/bin/bash
if python3 /tests/check.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
DOCKERFILE = """# the world
FROM docker.io/library/python:3.13-slim
WORKDIR /app
COPY log.txt helper.sh ./
COPY data /opt/data/
ENV UNIT="two words"
RUN mkdir -p out \\
    && echo "$UNIT" > out/unit.txt
CMD ["bash"]
"""


def folder(root: Path, name: str = "count", **changes: str) -> Path:
    files = {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 20.0\n[verifier]\ntimeout_sec = 10.0\n',
        "instruction.md": "Count the lines of /app/log.txt that hold ERROR into /app/out/count.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/log.txt": "ERROR a\nINFO b\nERROR c\n",
        "environment/helper.sh": "grep -c ERROR /app/log.txt\n",
        "environment/data/deep/x.txt": "x\n",
        "tests/test.sh": TEST_SH,
        "tests/check.py": "import sys\nsys.exit(open('/app/out/count').read().strip() != '2')\n",
        **changes,
    }
    for path, text in files.items():
        file = root / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root / name


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(
    environment: Environment, *responses: str, turns_left: int | None = None
) -> list[Step]:
    episode, steps = await environment.reset(environment.tasks("train")[0]), []
    try:
        for response in responses:
            episode.turns += 1
            last = response is responses[-1]
            episode.turns_left = turns_left if last else None
            steps.append(await environment.step(episode, response))
    finally:
        await environment.close(episode)
    return steps


def played(environment: Environment, *responses: str, turns_left: int | None = None) -> list[Step]:
    return asyncio.run(play(environment, *responses, turns_left=turns_left))


@needs_bubblewrap
def test_a_folder_is_laid_out_and_its_own_tests_give_the_reward(tmp_path: Path) -> None:
    environment = ENVIRONMENT.build(f"harbor:{folder(tmp_path)}")
    (task,) = environment.tasks("train")
    assert task.prompt[-1] == {
        "role": "user",
        "content": (tmp_path / "count" / "instruction.md").read_text(),
    }
    look = called(
        "bash",
        command="pwd; ls; cat out/unit.txt /opt/data/deep/x.txt; echo $UNIT; ls /tests | wc -l",
    )
    work = called("bash", command="bash helper.sh > out/count")
    steps = played(environment, look, work, called("read_file", path="out/count"), "done")
    said = "/app\nhelper.sh\nlog.txt\nout\ntwo words\nx\ntwo words\n0\n"
    assert [step.observation[0]["content"] for step in steps[:3]] == [said, "[no output]", "2\n"]
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].metrics["tool_calls"]) == (
        1.0,
        True,
        3.0,
    )
    nothing = played(environment, "done")[-1]
    assert (nothing.reward, nothing.terminated, nothing.metrics["no_calls"]) == (0.0, True, 1.0)
    last = played(environment, work, turns_left=0)[
        -1
    ]  # the last calls count, the end is no verdict
    assert (last.reward, last.terminated) == (1.0, False)


@needs_bubblewrap
def test_what_a_policy_leaves_in_the_way_of_the_tests_is_gone(tmp_path: Path) -> None:
    environment = ENVIRONMENT.build(f"harbor:{folder(tmp_path)}")
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json; "
    forged += "echo 'exit(0)' > /tests/check.py; mkdir /tests/json; ln -s /app /tests/link"
    assert played(environment, called("bash", command=forged), "done")[-1].reward == 0.0


@needs_bubblewrap
def test_a_policy_that_keeps_the_tests_out_gets_no_reward(tmp_path: Path) -> None:
    environment = ENVIRONMENT.build(f"harbor:{folder(tmp_path)}")
    step = played(
        environment,
        called("bash", command="rm -f /box/script.sh; mkdir -p /box/script.sh/x"),
        "done",
    )[-1]
    assert (step.reward, step.terminated, step.metrics["tests_killed"]) == (0.0, True, 1.0)


@needs_bubblewrap
def test_a_policy_that_breaks_the_tests_gets_no_reward_and_tests_that_never_work_are_no_verdict(
    tmp_path: Path,
) -> None:
    """Tests that write no reward are tried on the untouched task: who broke them?"""
    script = "set -e\ncat /app/log.txt > /dev/null\necho 1 > /logs/verifier/reward.txt\n"
    environment = ENVIRONMENT.build(f"harbor:{folder(tmp_path, **{'tests/test.sh': script})}")
    work, breaks = called("bash", command="true"), called("bash", command="rm /app/log.txt")
    assert played(environment, work, "done")[-1].reward == 1.0
    for _ in range(2):
        step = played(environment, breaks, "done")[-1]
        assert (step.reward, step.terminated, step.metrics["tests_killed"]) == (0.0, True, 1.0)
    changed = {"tests/test.sh": script.replace("log.txt", "missing.txt")}
    never = ENVIRONMENT.build(f"harbor:{folder(tmp_path, 'never', **changed)}")
    for said in (work, breaks):
        with pytest.raises(HarborError, match="its tests wrote no reward"):
            played(never, said, "done")


@needs_bubblewrap
def test_a_dockerfile_is_followed_in_its_order(tmp_path: Path) -> None:
    lines = (
        "FROM --platform=linux/amd64 ubuntu:24.04 AS base", "WORKDIR /app", "RUN touch old && \\", "", "  rm -f /app/log.txt",
        "COPY log.txt /app", "COPY helper.sh /app/.", "COPY log.txt /opt/new/", "COPY log.txt /opt/new", 'RUN ["touch", "a b"]',
        "RUN --mount=type=cache,target=/x mv log.txt x.txt", "COPY log.txt other.txt", "ARG NAME=a OTHER", "ARG NAME",
        "RUN echo $NAME > said", "COPY --chmod=755 helper.sh run", "RUN test -x run && ! test -x helper.sh",
    )  # fmt: skip
    environment = ENVIRONMENT.build(
        f"harbor:{folder(tmp_path, **{'environment/Dockerfile': chr(10).join(lines)})}"
    )
    (step,) = played(environment, called("bash", command="ls /app /opt/new; cat said; echo $NAME"))
    listed = "/app:\na b\nhelper.sh\nold\nother.txt\nrun\nsaid\nx.txt\n\n/opt/new:\nlog.txt\n"
    assert step.observation[0]["content"] == f"{listed}a\n\n"


@needs_bubblewrap
def test_rewards_are_read_as_harbor_reads_them(tmp_path: Path) -> None:
    def reward(name: str, script: str) -> Step:
        made = folder(tmp_path, name, **{"tests/test.sh": f"{script}\n"})
        return played(ENVIRONMENT.build(f"harbor:{made}"), "done")[-1]

    named = reward(
        "named",
        """echo 0 > /logs/verifier/reward.txt; echo '{"a": 1, "b": 0.5}' > /logs/verifier/reward.json""",
    )
    assert (named.reward, named.rewards) == (0.75, {"a": 1.0, "b": 0.5})
    for name, script, told in (
        ("silent", "echo so; exit 3", "its tests wrote no reward: so"),
        ("empty", "> /logs/verifier/reward.txt", "expected a reward, found ''"),
        ("words", "echo NaN > /logs/verifier/reward.txt", "expected a reward"),
    ):
        with pytest.raises(HarborError, match=told):
            reward(name, script)


@needs_bubblewrap
@pytest.mark.slow
def test_programs_that_hang_flood_or_fork_cost_the_policy_its_time_and_no_more(
    tmp_path: Path,
) -> None:
    made = folder(tmp_path, **{"tests/check.py": "exec(open('/app/out/answer.py').read())\n"})
    toml = "[agent]\ntimeout_sec = {}\n[verifier]\ntimeout_sec = 2.0\n"
    (made / "task.toml").write_text(toml.format(300.0))
    environment = ENVIRONMENT.build({"name": "harbor", "folder": str(made), "command_s": 1.0})
    steps = played(
        environment, *(called("bash", command=one) for one in ("yes", FORKS, "sleep 9")), "done"
    )
    assert "characters left out" in steps[0].observation[0]["content"]
    assert (
        "killed" in steps[1].observation[0]["content"]
        and "longer than" in steps[2].observation[0]["content"]
    )
    assert steps[-1].metrics["limits_reached"] == 3.0
    loop = played(
        environment,
        called("write_file", path="out/answer.py", content="while True: pass\n"),
        "done",
    )[-1]
    assert (loop.reward, loop.terminated, loop.metrics["tests_killed"]) == (0.0, True, 1.0)
    (made / "task.toml").write_text(toml.format(3.0))
    environment = ENVIRONMENT.build({"name": "harbor", "folder": str(made), "command_s": 1.0})
    late = played(environment, *[called("bash", command="sleep 9")] * 4)
    assert late[2].terminated and late[2].metrics["out_of_time"] == 1.0


@needs_bubblewrap
@pytest.mark.slow
def test_folders_keep_the_contract_and_many_play_at_once(tmp_path: Path) -> None:
    for number in range(3):
        folder(tmp_path, f"task-{number}")
    environment = ENVIRONMENT.build(f"harbor:{tmp_path}")
    report = check_environment(environment, episodes=4)
    assert report.passed, str(report)

    async def many() -> list[list[Step]]:
        work = called("bash", command="bash helper.sh > out/count")
        said = [(work, "done") if number % 2 else ("done",) for number in range(64)]
        return await asyncio.gather(*(play(environment, *responses) for responses in said))

    assert [steps[-1].reward for steps in asyncio.run(many())] == [0.0, 1.0] * 32


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            "environment/Dockerfile",
            "FROM nvidia/cuda:13\n",
            r"Dockerfile:1: the task needs an image \(nvidia/cuda:13\)",
        ),
        (
            "environment/Dockerfile",
            "FROM ubuntu\n\nRUN true \\\n && apt-get update\n",
            "Dockerfile:3: .*installed=true",
        ),
        ("environment/Dockerfile", "FROM ubuntu\nCOPY --from=x /a /b\n", "Dockerfile:2: "),
        (
            "environment/Dockerfile",
            "FROM ubuntu\nCOPY log.txt /etc/log.txt\n",
            r"needs an image \(/etc/log.txt\)",
        ),
        (
            "environment/Dockerfile",
            "FROM ubuntu\nCOPY ../../key.txt /app/\n",
            "Dockerfile:2: .*expected a file of the task",
        ),
        (
            "environment/Dockerfile",
            "FROM ubuntu\nCOPY log.txt /log.txt\n",
            r"Dockerfile:2: .*a file in / \(/log.txt\)",
        ),
        (
            "environment/Dockerfile",
            "FROM ubuntu\nENV PATH /opt/x:$PATH\n",
            "Dockerfile:2: .*ENV PATH",
        ),
        (
            "environment/Dockerfile",
            "FROM ubuntu\nENV A='x\n",
            "Dockerfile:2: .*No closing quotation",
        ),
        ("environment/Dockerfile", "FROM ubuntu\nWORKDIR $HOME/app\n", "Dockerfile:2: .*WORKDIR"),
        ("environment/Dockerfile", "FROM\n", "Dockerfile:1: expected the image"),
        ("environment/Dockerfile", "FROM ubuntu\nARG A=$B\n", "Dockerfile:2: .*ARG A"),
        (
            "environment/Dockerfile",
            "FROM ubuntu\nCOPY --parents data/deep /app/\n",
            "Dockerfile:2: .*--parents",
        ),
        ("environment/.dockerignore", "solution\n", ".dockerignore: the task needs an image"),
        (
            "environment/docker-compose.yaml",
            "services: {}\n",
            "docker-compose.yaml: the task needs services",
        ),
        (
            "task.toml",
            "[environment]\ndocker_image = 'a/b:1'\n",
            r"task.toml: the task needs an image \(docker_image\)",
        ),
        ("task.toml", "[[steps]]\nname = 'one'\n", "several steps"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "tests in an image"),
        ("task.toml", "[verifier.env]\nKEY = '${OPENAI_API_KEY}'\n", "variables of yours"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'\n", "timeout_sec: expected seconds"),
        ("tests/test.sh", "#!/bin/bash\nuvx pytest /tests\n", "test.sh:2: .*tests=COMMAND"),
    ],
)
def test_what_needs_an_image_is_refused_with_the_file(
    tmp_path: Path, file: str, text: str, told: str
) -> None:
    (tmp_path / "key.txt").write_text("secret")
    made = folder(tmp_path, **{file: text})
    with pytest.raises(DataError, match=told) as caught:
        read_folders(str(made), installed=False, own_tests=True)
    assert "\n" not in str(caught.value)


def test_what_is_no_task_or_leads_out_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected folders with a task.toml, found none"):
        read_folders(str(tmp_path), False, True)
    made = folder(tmp_path)
    (made / "environment" / "data" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="found a link out of it"):
        read_folders(str(made), False, True)
    (made / "environment" / "Dockerfile").write_text("FROM ubuntu\nCOPY linked /app/\n")
    (made / "environment" / "linked").symlink_to(tmp_path)
    with pytest.raises(DataError, match="Dockerfile:2: linked: expected a file of the task"):
        read_folders(str(made), False, True)
    (made / "environment" / "Dockerfile").write_text("FROM ubuntu\nADD data.tgz /app/\n")
    with tarfile.open(made / "environment" / "data.tgz", "w:gz") as archive:
        archive.add(made / "task.toml", "x")
    with pytest.raises(
        DataError, match=r"Dockerfile:2: the task needs an image \(ADD data.tgz /app/: an archive"
    ):
        read_folders(str(made), False, True)
    old = tmp_path / "old"
    old.mkdir()
    (old / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(DataError, match="Terminal-Bench 1"):
        read_folders(str(old), False, True)


PLACES = {
    "task.toml": "id_rsa",
    "instruction.md": "id_rsa",
    "environment": ".",
    "environment/Dockerfile": "Dockerfile",
    "environment/log.txt": "id_rsa",
    "environment/data/deep/x.txt": "id_rsa",
    "environment/data": ".",
    "tests": ".",
    "tests/test.sh": "test.sh",
    "tests/check.py": "id_rsa",
}
"""Path in a task -> what of the home it is a link to."""


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
@pytest.mark.parametrize("place", PLACES)
def test_no_link_of_a_task_carries_a_file_of_this_machine_anywhere(
    tmp_path: Path, place: str, absolute: bool
) -> None:
    """Wherever it stands: what is read for the prompt, laid out for the policy, or shown to the tests."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "id_rsa").write_text("[agent]\nkey = 'secret'\n")
    (home / "test.sh").write_text("true\n")
    (home / "log.txt").write_text("secret")
    (home / "Dockerfile").write_text("FROM ubuntu\nCOPY log.txt /app/\n")
    made = folder(tmp_path / "tasks")
    target = home / PLACES[place]
    link = made / place
    shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.symlink_to(target if absolute else os.path.relpath(target, link.parent))
    with pytest.raises(DataError, match="expected a file of the task"):
        for task in read_folders(str(made.parent), False, True):
            files_of_tests(task)


def test_links_within_a_task_are_followed(tmp_path: Path) -> None:
    """Also where the folder that was named is itself a link."""
    made = folder(tmp_path / "tasks")
    (made / "environment" / "data" / "again.txt").symlink_to("deep/x.txt")
    (made / "tests" / "again.py").symlink_to("check.py")
    (tmp_path / "link").symlink_to(tmp_path / "tasks")
    (task,) = read_folders(str(tmp_path / "link"), False, True)
    assert {name: path.read_text() for path, name in task.files}["/opt/data/again.txt"] == "x\n"
    assert {name: path.name for path, name in files_of_tests(task)} == {
        "/tests/again.py": "check.py", "/tests/check.py": "check.py", "/tests/test.sh": "test.sh",
    }  # fmt: skip


@needs_bubblewrap
def test_rows_of_tasks_for_a_shell_are_checked_by_their_script(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "Sort in.txt into out.txt.",
            "files": {"in.txt": "b\na\n"},
            "check": "cmp out.txt <(sort in.txt)",
        }
    ]
    data = tmp_path / "tasks.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    environment = ENVIRONMENT.build(
        {"name": "bash", "train": str(data), "tools": ["bash", "python", "read_file"]}
    )
    right = "open('out.txt', 'w').writelines(sorted(open('in.txt')))"
    steps = played(
        environment, called("python", code=right) + called("read_file", path="out.txt"), "done"
    )
    assert [message["content"] for message in steps[0].observation] == ["[no output]", "a\nb\n"]
    assert steps[-1].reward == 1.0 and played(environment, "done")[-1].reward == 0.0
    wrong = played(
        environment,
        called("bash"),
        called("write_file", path="x", content=""),
        "<tool_call>{</tool_call>",
        "done",
    )
    assert [step.observation[0]["content"][:23] for step in wrong[:3]] == [
        "Error: 'command' is mis", "Error: the tools are ba", "Error: a tool call is o"]  # fmt: skip
    assert wrong[-1].metrics["tool_errors"] == 3.0
    with pytest.raises(ConfigError, match="Did you mean 'bash'"):
        ENVIRONMENT.build({"name": "bash", "train": str(data), "tools": ["bsh"]})
    data.write_text('{"prompt": "x", "files": {"/app/a.txt": "hi"}, "check": "true"}\n')
    with pytest.raises(DataError, match=r"task '.*': its files: "):
        played(ENVIRONMENT.build(f"bash:{data}"), "done")
    data.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="line 1: 'check': expected a value, found nothing"):
        ENVIRONMENT.build(f"bash:{data}")
