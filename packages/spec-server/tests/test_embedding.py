"""The engine inside another program: two threads, an event loop, another app."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from spec_core import SamplingParams
from spec_server import Completion, ContextLengthError, Engine
from spec_server.http import create_app

TEXTS = {"S": "alpha beta gamma delta2", "U": "hi 😀漢!", "K": "42."}
ENDLESS = SamplingParams(logit_bias={257: -100.0})


def test_two_threads(scripted_engine: Engine) -> None:
    found: dict[int, list[str]] = {0: [], 1: []}

    def work(number: int) -> None:
        for script in ("S", "U", "K") * 3:
            found[number].append(scripted_engine.generate(script).text)

    threads = [threading.Thread(target=work, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == [TEXTS[script] for script in ("S", "U", "K") * 3]


def test_asyncio(scripted_engine: Engine) -> None:
    async def streamed(script: str) -> str:
        return "".join([chunk.text async for chunk in scripted_engine.astream(script)])

    async def main() -> tuple[list[str], list[Completion]]:
        texts = asyncio.gather(*(streamed(script) for script in ("S", "U", "K") * 3))
        wholes = asyncio.gather(*(scripted_engine.agenerate(script) for script in ("S", "U")))
        return await texts, await wholes

    texts, wholes = asyncio.run(main())
    assert texts == [TEXTS[script] for script in ("S", "U", "K") * 3]
    assert [answer.text for answer in wholes] == [TEXTS["S"], TEXTS["U"]]


def test_asyncio_errors_and_ends(scripted_engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(ContextLengthError):
            await scripted_engine.agenerate("x" * 500)
        answer = scripted_engine.astream("S")
        first = await answer.result()
        assert (await answer.result()) is first

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_leaving_in_asyncio_frees_the_row(scripted_engine: Engine, how: str) -> None:
    async def read(began: asyncio.Event) -> None:
        async with scripted_engine.astream("S", sampling=ENDLESS) as answer:
            async for _ in answer:
                began.set()
                if how == "leave":
                    return

    async def main() -> None:
        began = asyncio.Event()
        task = asyncio.create_task(read(began))
        await began.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        while scripted_engine.activity.running:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert scripted_engine.generate("S").text == TEXTS["S"]


def test_below_a_prefix_of_another_app(scripted_engine: Engine) -> None:
    async def home(request: object) -> PlainTextResponse:
        return PlainTextResponse("my own page")

    app = Starlette(
        routes=[Route("/", home), Mount("/deep/llm", create_app(scripted_engine), name="llm")]
    )
    body = {"messages": [{"role": "user", "content": "S"}], "stream": True}
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/").text == "my own page"
        assert client.get("/deep/llm/health").json()["status"] == "ok"
        assert client.get("/deep/llm/v1/models/scripted").json()["id"] == "scripted"
        answer = client.post("/deep/llm/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        assert client.post("/v1/chat/completions", json=body).status_code == 404


def test_two_apps_over_one_engine(scripted_engine: Engine) -> None:
    apps = [create_app(scripted_engine) for _ in range(2)]
    for app in apps:
        with TestClient(app, base_url="http://localhost") as client:
            assert "spec_num_requests_running" in client.get("/metrics").text
