#!/usr/bin/env python3
"""A program that answers Chromium's protocol as far as a pool of pages speaks it, without any page.

A page's answer is what it was asked to evaluate. Texts in that make it misbehave: `loop` is never answered, `die` ends the
program, `alert` opens a dialog, `throw` is a script's error, `stop` stops the whole program as SIGSTOP does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from aiohttp import WSMsgType, web


async def answer(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    made = 0
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            break
        said = json.loads(message.data)
        method, session = said["method"], said.get("sessionId", "")
        asked = said["params"].get("expression", "")
        result: dict[str, object] = {}
        if method == "Target.createTarget":
            made += 1
            result = {"targetId": f"target-{made}"}
        elif method == "Target.attachToTarget":
            result = {
                "sessionId": said["params"]["targetId"].replace("target", f"session-{os.getpid()}")
            }
        elif method == "Page.captureScreenshot":
            result = {"data": "YQ=="}
        elif "loop" in asked:
            continue
        elif "die" in asked:
            os._exit(3)
        elif "stop" in asked:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif "alert" in asked:
            event = {
                "method": "Page.javascriptDialogOpening",
                "sessionId": session,
                "params": {"message": "boo"},
            }
            await socket.send_json(event)
            continue
        elif "throw" in asked:
            result = {
                "result": {},
                "exceptionDetails": {"exception": {"description": "Error: thrown"}},
            }
        elif method == "Runtime.evaluate":
            result = {"result": {"value": f"{session} {asked}"}}
        await socket.send_json({"id": said["id"], "result": result})
    return socket


async def main() -> None:
    folder = Path(
        next(word for word in sys.argv if word.startswith("--user-data-dir=")).split("=", 1)[1]
    )
    app = web.Application()
    app.router.add_get("/devtools/browser/fake", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    folder.mkdir(parents=True, exist_ok=True)
    port = runner.addresses[0][1]
    draft = folder / "draft"
    draft.write_text(f"{port}\n/devtools/browser/fake")
    draft.rename(folder / "DevToolsActivePort")
    await asyncio.Event().wait()


asyncio.run(main())
