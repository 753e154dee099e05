#!/usr/bin/env python3
"""A program that answers Chromium's protocol as far as a pool of pages speaks it, without any page.

Messages end with a NUL; they come through descriptor 3 and go to descriptor 4. A page's answer is what it was asked to
evaluate. Texts in that make it misbehave: `loop` is never answered, `die` ends the program, `alert` opens a dialog, `throw`
is a script's error, `stop` stops the whole program as SIGSTOP does, `flags` are its command line, `noise` is no message."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

made = 0


def answer(said: dict[str, Any]) -> dict[str, Any] | None:
    """A result; None where there is none."""
    global made
    method, session = said["method"], said.get("sessionId", "")
    asked = said["params"].get("expression", "")
    if method == "Target.createTarget":
        made += 1
        return {"targetId": f"target-{made}"}
    if method == "Target.attachToTarget":
        return {"sessionId": said["params"]["targetId"].replace("target", f"session-{os.getpid()}")}
    if method == "Page.captureScreenshot":
        return {"data": "YQ=="}
    if "loop" in asked:
        return None
    if "die" in asked:
        os._exit(3)
    if "stop" in asked:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "alert" in asked:
        event = {"method": "Page.javascriptDialogOpening", "sessionId": session}
        send({**event, "params": {"message": "boo"}})
        return None
    if "noise" in asked:
        os.write(4, b"[1]\0")
        return None
    if "throw" in asked:
        return {"result": {}, "exceptionDetails": {"exception": {"description": "Error: thrown"}}}
    if "flags" in asked:
        return {"result": {"value": sys.argv[1:]}}
    if method == "Runtime.evaluate":
        return {"result": {"value": f"{session} {asked}"}}
    return {}


def send(message: dict[str, Any]) -> None:
    os.write(4, json.dumps(message).encode() + b"\0")


rest = b""
while data := os.read(3, 1 << 16):
    *messages, rest = (rest + data).split(b"\0")
    for said in map(json.loads, messages):
        result = answer(said)
        if result is not None:
            send({"id": said["id"], "result": result})
