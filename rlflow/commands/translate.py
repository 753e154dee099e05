"""The report on another system's configuration, key by key, and ours as a file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rlflow.config.foreign import ReadKey, Translation
from rlflow.config.loading import config_text, differences
from rlflow.errors import ConfigError, command
from rlflow.run.directory import run_path
from rlflow.storage.files import write_text
from rlflow.storage.redaction import redact

MOST_SHOWN = 40  # keys that nobody knows
WIDEST = 44  # columns of a value; longer ones are cut


def report(source: str, translation: Translation) -> None:
    """Prints every key of theirs under what became of it."""
    total = sum(map(len, translation.outcomes.values()))
    print(f"{source}: a configuration of {translation.system}, {total} keys")
    for outcome, keys in translation.outcomes.items():
        print(f"\n{outcome}: {len(keys)}")
        if outcome.startswith("taken"):
            for key in keys:
                print(f"  {_shown(key)}  ->  {key.told}")
            continue
        for reason in dict.fromkeys(key.told for key in keys):
            print(f"  {reason}:" if reason else "  by any rule:")
            for key in keys:
                if key.told == reason:
                    print(f"    {_shown(key)}")


def summary(source: str, translation: Translation) -> str:
    """One line on what became of their keys, and a line for each that nobody knows."""
    counts = ", ".join(
        f"{len(keys)} {outcome}" for outcome, keys in translation.outcomes.items() if keys
    )
    lines = [
        f"{source}: a configuration of {translation.system}: {counts}; `{command()} train --config "
        f"{shlex.quote(source)}` tells of each key"
    ]
    unknown = translation.outcomes["not known"]
    lines += [f"  not known: {_shown(key)}" for key in unknown[:MOST_SHOWN]]
    if len(unknown) > MOST_SHOWN:
        lines.append(f"  and {len(unknown) - MOST_SHOWN} more")
    return "\n".join(lines)


def write(source: str, translation: Translation, given: str | None, overwrite: bool) -> None:
    """Writes our configuration to the given path, else beside the run, and prints how to run it.

    Raises ConfigError where another file is in the way.
    """
    path = Path(given) if given else Path(f"{run_path(translation.config.run)}.yaml")
    origin = f"# Made from {source}, a configuration of {translation.system}, by rlflow train.\n"
    text = origin + config_text(differences(translation.config))
    written = text.encode(errors="backslashreplace")
    if path.exists() and not overwrite and path.read_bytes() != written:
        advice = "--overwrite replaces it, --out FILE writes elsewhere"
        raise ConfigError(f"{path}: there already, with another content; {advice}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text, private=True)
    config = shlex.quote(str(path))
    words = f"train --config {config}"
    if translation.evaluates:
        asked = translation.config.evaluation
        model = shlex.quote(translation.config.model.path)
        words = f"eval --config {config} --model {model} --temperature {asked.temperature:g}"
        words += f" --samples {asked.samples_per_prompt}"
        words += f" --questions {asked.questions}" if asked.questions else ""
    print(f"\nwritten: {path}. Nothing was started; run it with\n\n  {command()} {words}")


def _shown(key: ReadKey) -> str:
    value = redact({key.name.rpartition(".")[2]: key.value}).popitem()[1]
    text = json.dumps(value, ensure_ascii=False)
    return f"{key.name}: {text if len(text) <= WIDEST else text[:WIDEST] + '...'}"
