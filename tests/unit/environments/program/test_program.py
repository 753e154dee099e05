"""Programs as agents: rewards, and every way to fail, which is never a reward of 0."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_tokenizer

from rlflow.errors import ConfigError, DataError
from rlflow.rollout import Tokenizer
from rlflow.storage.guard import marked
from rlflow.types import StopReason, Trajectory
from rlflow_environments.program.program import ProgramEnvironment, verdict_of
from rlflow_environments.program.running import ProgramError
from tests.unit.environments.endpoint.scripted import checked, environment, play, rows
from tests.waiting import until

pytest.importorskip("starlette")
# Without a vendor's package, which takes a second to import
ASK = """
import json, os, sys, time, urllib.request

def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
                                     {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))

def ask(text):
    reply = post("/chat/completions", {"messages": [{"role": "user", "content": text}]})
    return reply["choices"][0]["message"]["content"]

task = json.load(open(os.environ["RLFLOW_TASK"]))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def played(tokenizer: Tokenizer, folder: Path, body: str, **options: Any) -> Trajectory:
    (folder / "agent.py").write_text(ASK + body, encoding="utf-8")
    tasks = rows(folder / "tasks.jsonl", {"id": "one", "question": "Who?", "answer": "Yes"})
    made = ProgramEnvironment(f"{sys.executable} -S {folder / 'agent.py'}", tasks, **options)
    (one,), fed = play(made, tokenizer, lambda text, number: "Yes")
    if one.usable:
        checked(one, fed)
    assert not list(marked(f"RLFLOW_TEST_FOLDER={folder}"))
    return one


POST = "ask(task['question'])\npost('/reward', {'reward': 0.25, 'metrics': {'length': 3}})"


def test_the_reward_that_a_program_posts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    one = played(tokenizer, tmp_path, POST)
    assert (one.reward, one.metrics["length"], one.metrics["score"]) == (0.25, 3.0, 0.25)
    assert one.stop is StopReason.TERMINATED and one.prompt == "user: Who?"


def test_the_reward_of_a_function_sees_the_answer_and_the_conversation(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(
        "def reward(task, played):\n"
        "    assert played['messages'][-1]['content'] == task['answer'] and 'answer' not in eval(played['output'])\n"
        "    return 0.5\n"
    )
    body = "ask(task['question'])\nprint(repr(task))"
    assert played(tokenizer, tmp_path, body, reward=f"{tmp_path / 'judge.py'}:reward").reward == 0.5


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('a'); print(0.75)", 0.75),
        ("print('all passed')", 1.0),
        ("raise SystemExit(1)", 0.0),
        ("import sys; print(0.25, flush=True); sys.stderr.write('ResourceWarning')", 0.25),
    ],
)
def test_the_reward_of_a_command_is_its_last_line_or_its_exit_code(
    script: str, expected: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(script)
    command = f"{sys.executable} -S {tmp_path / 'judge.py'}"
    assert (
        played(tokenizer, tmp_path, "ask(task['question'])", reward_command=command).reward
        == expected
    )


@pytest.mark.parametrize(
    ("code", "output", "errors", "verdict"),
    [
        (0, "looked\n0.75\n", "", 0.75),
        (0, "", "", 1.0),
        (0, "3 passed in 0.1 s", "a warning", 1.0),
        (1, "", "", 0.0),
        (1, "1 failed", " \n", 0.0),
        (1, "0", "", 0.0),
        (1, "0.75", "", None),
        (1, "", "Traceback (most recent call last): ...\nModuleNotFoundError: numpy", None),
        (2, "", "", None),
        (127, "", "", None),
        (-9, "0.5", "", None),
    ],
)
def test_a_reward_command_that_crashes_gives_no_verdict(
    code: int, output: str, errors: str, verdict: float | None
) -> None:
    """Exit codes as of diff, grep and test: 0 for yes, 1 for no, more for trouble. Python ends with 1 after an uncaught error
    too, with words on stderr."""
    if verdict is None:
        with pytest.raises(ProgramError, match="is no verdict"):
            verdict_of(code, output, errors)
    else:
        assert verdict_of(code, output, errors) == verdict


def test_a_crashed_judge_aborts_its_episode_with_the_reason(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text("import a_missing_library\nprint(1.0)\n")
    command = f"{sys.executable} -S {tmp_path / 'judge.py'}"
    one = played(tokenizer, tmp_path, "ask(task['question'])", reward_command=command)
    assert one.stop is StopReason.ABORTED and "No module named 'a_missing_library'" in one.error


@pytest.mark.parametrize("who", ["agent", "judge"])
def test_a_program_says_with_its_exit_code_that_the_policy_is_to_blame(
    who: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """65, EX_DATAERR of sysexits.h: the episode counts as wrong."""
    (tmp_path / "judge.py").write_text("import sys\nsys.exit(65)\n")
    command = f"{sys.executable} -S {tmp_path / 'judge.py'}"
    body = "ask('x')\nprint('no JSON')" + ("\nsys.exit(65)" if who == "agent" else "")
    one = played(tokenizer, tmp_path, body, reward_command=command)
    assert one.unscorable and (one.reward, one.metrics["score"]) == (0.0, 0.0)
    assert one.metrics["requests"] == 1.0 and "ended with code 65" in one.error


@pytest.mark.parametrize("who", ["agent", "reward"])
def test_a_function_blames_the_policy_by_its_error(
    who: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    blame = "    raise rlflow.PolicyError('unreadable', reward=-1.0)\n"
    agent = (
        "import rlflow\nasync def agent(task, client):\n"
        "    asked = [{'role': 'user', 'content': task['prompt']}]\n"
        "    await client.chat.completions.create(model='policy', messages=asked)\n"
        + (blame if who == "agent" else "")
    )
    (tmp_path / "judge.py").write_text("import rlflow\ndef reward(task, played):\n" + blame)
    made = environment(tmp_path, agent, reward=f"{tmp_path / 'judge.py'}:reward")
    (one,), _ = play(made, tokenizer, lambda text, number: "Yes")
    assert one.unscorable and (one.reward, one.metrics["score"]) == (-1.0, -1.0), one.error


# ------------------------------------------------------------ what an agent sees

ROW = {
    "id": "7",
    "question": "Who?",
    "messages": [],
    "answer": "Ann",
    "gold": "Ann",
    "ground_truth": "Ann",
    "expected": ["Ann"],
    "label": 1,
    "files": {"a.txt": "text"},
}


def test_an_agent_sees_the_question_and_what_is_named_and_nothing_else(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever an answer is called, it stays with the reward."""
    (tmp_path / "agent.py").write_text(
        ASK + "ask('x')\nprint(json.dumps(task))\npost('/reward', {'reward': 1})"
    )
    (tmp_path / "judge.py").write_text(
        "import json\ndef reward(task, played):\n"
        "    shown = json.loads(played['output'])\n"
        f"    assert task == {ROW!r}\n"
        "    return float(shown == {key: task[key] for key in ('id', 'question', 'messages', 'files')})\n"
    )
    options = {"agent_keys": ["files"], "reward": f"{tmp_path / 'judge.py'}:reward"}
    tasks = rows(tmp_path / "tasks.jsonl", ROW)
    made = ProgramEnvironment(f"{sys.executable} -S {tmp_path / 'agent.py'}", tasks, **options)
    assert (
        "does not see 'answer', 'gold', 'ground_truth', 'expected', 'label' of its task"
        in caplog.text
    )
    (one,), _ = play(made, tokenizer, lambda text, number: "Yes")
    assert one.reward == 1.0, one.error


def test_keys_to_show_are_checked_and_a_row_without_a_text_hides_its_answer(
    tmp_path: Path,
) -> None:
    tasks = rows(tmp_path / "tasks.jsonl", {"case": 3, "gold": "Ann"})
    with pytest.raises(ConfigError, match=r"no row has 'cases'\. Did you mean 'case'"):
        ProgramEnvironment("true", tasks, agent_keys=["cases"])
    (task,) = ProgramEnvironment("true", tasks, agent_keys=["case"]).tasks("train")
    assert task.prompt == [{"role": "user", "content": "{'case': 3}"}]


@pytest.mark.parametrize(
    "body, told",
    {
        "crashes": (
            "ask('x')\nraise ValueError('my mistake')",
            "ended with code 1: .*ValueError: my mistake",
        ),
        "at once": ("1 / 0", "no response; .*ZeroDivisionError"),
        "asks nothing": (
            "print('I have no question')",
            "asked for no response; it ended: I have no question",
        ),
        "hangs": (
            "ask('x')\nprint('waiting', flush=True)\ntime.sleep(60)",
            "neither asked nor ended within 1 s .*waiting",
        ),
        "no reward": ("ask('x')", "has no reward"),
        "killed": ("ask('x')\nos.kill(os.getpid(), 9)", "killed by SIGKILL"),
        "leaves processes": (
            "ask('x')\nfor _ in range(3):\n  if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nsys.exit('so it ends')",
            "so it ends",
        ),
    }.values(),
    ids=["crashes", "at once", "asks nothing", "hangs", "no reward", "killed", "leaves processes"],
)
def test_a_program_that_fails_aborts_its_episode_with_its_last_lines(
    body: str, told: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import re

    variables = {"RLFLOW_TEST_FOLDER": str(tmp_path)}
    started = time.monotonic()
    one = played(
        tokenizer,
        tmp_path,
        body,
        timeout_s=1.0 if "hangs" in told or "within" in told else 20.0,
        variables=variables,
    )
    assert one.stop is StopReason.ABORTED and re.search(told, one.error), one.error
    assert time.monotonic() - started < 15


def test_a_program_that_a_limit_refused_is_truncated_however_it_ends(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(ASK + "for _ in range(9):\n  ask('again')")
    made = ProgramEnvironment(
        f"{sys.executable} -S {tmp_path / 'agent.py'}",
        rows(tmp_path / "tasks.jsonl", {"prompt": "x"}),
    )
    (one,), fed = play(made, tokenizer, lambda text, number: "Yes", max_turns=2)
    checked(one, fed)
    assert one.stop is StopReason.MAX_TURNS and len(one.turns) == 2 and one.reward == 0.0


def test_proxies_that_are_left_out_stay_so(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "internal.corp")
    one = played(tokenizer, tmp_path, "sys.exit(os.environ['no_proxy'])")
    assert "internal.corp,127.0.0.1,localhost" in one.error


def test_messages_as_text_for_models_without_a_chat_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    body = (
        "messages = [{'role': 'user', 'content': 'Question: x\\n'}]\n"
        "asked = {'messages': messages, 'stop': ['</b>'], 'include_stop_str_in_output': True}\n"
        "messages.append(post('/chat/completions', asked)['choices'][0]['message'])\n"
        "messages.append({'role': 'tool', 'content': '\\nfound\\n'})\n"
        "post('/chat/completions', asked)\npost('/reward', {'reward': 1})"
    )
    (tmp_path / "agent.py").write_text(ASK + body)
    tasks = rows(tmp_path / "tasks.jsonl", {"prompt": "x"})
    made = ProgramEnvironment(
        f"{sys.executable} -S {tmp_path / 'agent.py'}", tasks, messages="text"
    )
    (one,), fed = play(made, tokenizer, lambda text, number: "<b>1</b>")
    checked(one, fed)
    assert len(one.segments) == 1
    assert (
        tokenizer.decode(one.segments[0].tokens.tolist(), False)
        == "Question: x\n<b>1</b>\nfound\n<b>1</b>"
    )


def test_every_tenth_row_is_for_validation_where_no_file_is(tmp_path: Path) -> None:
    tasks = rows(
        tmp_path / "tasks.jsonl", *({"id": str(number), "prompt": "x"} for number in range(20))
    )
    for files, counts in (
        ((tasks,), (18, 2)),
        ((tasks, tasks), (20, 20)),
        ((None, tasks), (0, 20)),
    ):
        made = ProgramEnvironment("true", *files)
        assert (len(made.tasks("train")), len(made.tasks("val"))) == counts


def test_bad_options_are_one_clear_error(tmp_path: Path) -> None:
    tasks = rows(tmp_path / "tasks.jsonl", {"prompt": "x"})
    with pytest.raises(ConfigError, match="expected agent=COMMAND"):
        ProgramEnvironment(None, tasks)
    with pytest.raises(ConfigError, match="expected agent=COMMAND"):
        ProgramEnvironment("python agent.py")
    with pytest.raises(ConfigError, match="found both"):
        ProgramEnvironment("python agent.py", tasks, reward="a.py:b", reward_command="true")
    with pytest.raises(ConfigError):
        ProgramEnvironment(f"{tmp_path / 'nothing.py'}:agent", tasks)
    for options, told in (
        ({"agent": " "}, "environment.agent: expected a command, found nothing"),
        ({"agent": "python -c 'x"}, "environment.agent: .*No closing quotation"),
        (
            {"agent": "true", "reward_command": "python 'x"},
            "environment.reward_command: .*No closing",
        ),
        ({"agent": "true", "port": 70_000}, "environment.port: expected 0 to 65535, found 70000"),
    ):
        with pytest.raises(ConfigError, match=told):
            ProgramEnvironment(train=tasks, **options)
    with pytest.raises(DataError, match="line 1: 'agent': expected text, found None"):
        ProgramEnvironment("true", rows(tmp_path / "null.jsonl", {"prompt": "x", "agent": None}))
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="line 1: expected a JSON object"):
        ProgramEnvironment("python agent.py", tmp_path / "bad.jsonl")
    assert os.environ.get("OPENAI_BASE_URL") is None


@pytest.mark.slow
def test_64_programs_at_once_are_kept_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    body = (
        "said = [ask(os.environ['RLFLOW_EPISODE']) for _ in range(3)]\n"
        "post('/reward', {'reward': said == [os.environ['RLFLOW_EPISODE']] * 3 and 1})"
    )
    (tmp_path / "agent.py").write_text(ASK + body)
    tasks = rows(tmp_path / "tasks.jsonl", {"id": "one", "prompt": "x"})
    variables = {"RLFLOW_TEST_FOLDER": str(tmp_path)}
    made = ProgramEnvironment(
        f"{sys.executable} -S {tmp_path / 'agent.py'}", tasks, messages="text", variables=variables
    )
    found, fed = play(
        made, tokenizer, lambda text, number: text, episodes=64
    )  # the policy repeats what it is asked
    assert all(one.usable and one.reward == 1.0 and len(one.turns) == 3 for one in found)
    assert len({one.prompt for one in found}) == 64 and len(fed.said) == 192
    assert not list(marked(f"RLFLOW_TEST_FOLDER={tmp_path}"))


SETTLES = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(os.getpid(), child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(300)
"""
DRIVER = """
import asyncio, sys
from rlflow_environments.program.program import ProgramEnvironment
made = ProgramEnvironment(sys.argv[1], sys.argv[2])
asyncio.run(made.reset(made.tasks("train")[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard is Linux's")
def test_what_an_agent_started_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """In a session of its own too, which is not in the program's group."""
    (tmp_path / "agent.py").write_text(SETTLES, encoding="utf-8")
    tasks = rows(tmp_path / "tasks.jsonl", {"question": "Who?"})
    agent = f"{sys.executable} -S {tmp_path / 'agent.py'} {tmp_path / 'pids'}"
    with subprocess.Popen([sys.executable, "-c", DRIVER, agent, str(tasks)]) as driver:
        found = until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
        programs = [Path(f"/proc/{pid}") for pid in str(found).split()]
        assert len(programs) == 2 and all(place.exists() for place in programs)
        driver.kill()
    until(lambda: not any(place.exists() for place in programs), within_s=20)


LOOKS = """
mark = b"RLFLOW_AGENTS=" + os.environb[b"RLFLOW_AGENTS"]
def words(pid):
    try: return open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError: return []
guards = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in words(pid)]
ask("x")
post("/reward", {"reward": len(guards)})
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard is Linux's")
def test_a_guard_looks_for_the_mark_that_an_environments_programs_have(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert played(tokenizer, tmp_path, LOOKS).reward == 1.0
