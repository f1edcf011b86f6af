"""The chat endpoint's client against a server on 127.0.0.1 that answers from a script."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from uni_agent.engines.http import HttpPolicyFactory
from uni_agent.errors import ContextFull, EngineError, MessageError
from uni_agent.protocols import ChatRequest
from uni_agent.types import Message, Sampling, ToolCall, ToolResult, ToolSpec

ADD = ToolSpec("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}})
HELLO = ChatRequest((Message("user", "hello"),))


def said(content="hi", finish="stop", calls=(), **extra):
    message = {"role": "assistant", "content": content, **extra}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return {
        "choices": [{"message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3},
    }


class Server:
    """Answers one call after the other from `script`: a body, or (status, body, headers), or a delay."""

    def __init__(self):
        self.script, self.seen, self.headers, self.url = [], [], [], ""

    async def handle(self, request):
        self.seen.append(await request.json())
        self.headers.append(dict(request.headers))
        step = self.script.pop(0)
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = said("late")
        if isinstance(step, tuple):
            status, body, headers = step
            if isinstance(body, str):
                return web.Response(status=status, text=body, headers=headers)
            return web.json_response(body, status=status, headers=headers)
        return web.json_response(step)


@pytest.fixture
async def server():
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}/v1"
    yield server
    await runner.cleanup()


async def ask(server, request=HELLO, *, sampling=None, seed=1, **settings):
    async with HttpPolicyFactory(server.url, model="m", sampling=sampling, **settings) as factory:
        return await factory("e", seed).chat(request)


async def test_a_call_sends_what_the_endpoint_expects_and_reads_the_answer(server):
    server.script = [said("hey", reasoning_content="hmm"), said("cut", finish="length"), said(None)]
    sampling = Sampling(max_tokens=9, temperature=0.3, top_p=0.9, top_k=5, stop=("x",), seed=4)
    reply = await ask(server, sampling=sampling, api_key="secret")
    assert reply.message == Message("assistant", "hey", reasoning="hmm")
    assert (reply.finish, reply.prompt_tokens, reply.completion_tokens) == ("stop", 11, 3)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    body = server.seen[0]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert isinstance(body.pop("seed"), int)
    body.pop("messages")
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["x"],
    }
    assert (await ask(server)).finish == "length"
    assert "Authorization" not in server.headers[1]
    assert sorted(server.seen[1]) == ["max_tokens", "messages", "model", "temperature"]
    assert (await ask(server)).message.content == ""


async def test_tool_calls_round_trip_and_malformed_ones_are_kept(server):
    arguments = '{"a": 1, "s": "l1\\nl2 \\u00e9"}'
    server.script = [
        said(
            None,
            "tool_calls",
            [
                ("add", arguments),
                ("add", '{"a": 1'),
                ("add", ""),
                ("add", "null"),
                ("add", "[1]"),
                ("add", '"{}"'),
                ("add", {"a": 2}),
                ("add", '{"c": "x\ny"}'),
                ("", "{}"),
            ],
        ),
        said("done"),
    ]
    async with HttpPolicyFactory(server.url, model="m") as factory:
        policy = factory("e", 1)
        first = await policy.chat(ChatRequest(HELLO.messages, (ADD,)))
        calls = first.message.tool_calls
        assert [c.id for c in calls] == [f"c{i}" for i in range(9)]
        assert calls[0] == ToolCall("c0", "add", {"a": 1, "s": "l1\nl2 é"}, arguments)
        assert [c.error is None for c in calls] == [True, False, True, True, False, False, True, True, False]
        assert "invalid JSON" in calls[1].error
        assert calls[1].raw == '{"a": 1'
        assert calls[2].arguments == calls[3].arguments == {}
        assert "expected object, got list" in calls[4].error
        assert calls[6].arguments == {"a": 2}
        assert calls[7].arguments == {"c": "x\ny"}
        results = tuple(Message("tool", str(i), tool_call_id=c.id) for i, c in enumerate(calls))
        await policy.chat(ChatRequest((*HELLO.messages, first.message, *results), (ADD,)))
    assert server.seen[0]["tools"][0]["function"]["name"] == "add"
    sent = server.seen[1]["messages"][1]
    assert sent["content"] is None
    assert sent["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "s": "l1\\nl2 é"}'}
    assert sent["tool_calls"][1]["function"]["arguments"] == '{"malformed": "{\\"a\\": 1"}'
    assert server.seen[1]["messages"][2] == {"role": "tool", "content": "0", "tool_call_id": "c0"}


async def test_the_transcript_is_turns_without_tokens(server):
    server.script = [said("one"), said("other agent"), said("two"), said("rewritten")]
    async with HttpPolicyFactory(server.url, model="m") as factory:
        policy = factory("e", 5)
        assert (policy.seed, policy.trainable, policy.trajectories()) == (5, False, ())
        policy.record((), 1.0)  # before the first turn: nothing to attach to
        first = await policy.chat(HELLO)
        policy.record((ToolResult("c0", "add", "3"),), 0.5)
        await policy.chat(ChatRequest((Message("user", "aside"),), agent="helper"))
        more = Message("user", "more")
        await policy.chat(ChatRequest((*HELLO.messages, first.message, more)))
        await policy.chat(ChatRequest((Message("user", "summary"),)))
        await policy.close()
    main, helper = policy.trajectories()
    assert (main.agent, len(main.turns), helper.agent, len(helper.turns)) == ("main", 3, "helper", 1)
    assert len(main.token_ids) == 0
    assert [t.message.content for t in main.turns] == ["one", "two", "rewritten"]
    assert [t.observed for t in main.turns] == [HELLO.messages, (more,), (Message("user", "summary"),)]
    assert main.turns[0].reward == 0.5
    assert main.turns[0].tool_results[0].content == "3"
    assert [reply.message.content for _, reply in policy.turns] == ["one", "other agent", "two", "rewritten"]


async def test_seeds_differ_by_turn_and_episode_and_repeat(server):
    server.script = [said() for _ in range(6)]
    async with HttpPolicyFactory(server.url, model="m", sampling=Sampling(seed=0)) as factory:
        for policy in (factory("a", 1), factory("b", 2), factory("a", 1)):
            await policy.chat(HELLO)
            await policy.chat(HELLO)
    seeds = [body["seed"] for body in server.seen]
    assert seeds[:2] == seeds[4:]
    assert len(set(seeds)) == 4
    assert max(seeds) < 2**31


async def test_busy_broken_and_slow_servers_are_asked_again(server):
    server.script = [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0.3"}),
        (503, "no", {"Retry-After": "0"}),
        5.0,
        said("at last"),
    ]
    began = time.perf_counter()
    assert (await ask(server, timeout_s=0.5)).message.content == "at last"
    assert len(server.seen) == 4
    assert time.perf_counter() - began > 0.3 + 0.5


async def test_retries_end_with_url_and_status(server):
    server.script = [(500, {"error": {"message": "boom"}}, {"Retry-After": "0"})] * 3
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:\d+/v1/chat/completions answered status 500.*boom"):
        await ask(server, attempts=3)
    assert len(server.seen) == 3


async def test_a_wait_beyond_a_minute_is_not_waited_for(server):
    server.script = [(429, "come back tomorrow", {"Retry-After": "86400"})]
    with pytest.raises(EngineError, match=r"status 429.*come back tomorrow"):
        await ask(server)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_other_client_errors_are_not_repeated(server, status):
    server.script = [(status, {"error": {"message": "wrong model"}}, {})]
    with pytest.raises(EngineError, match=f"status {status} for model 'm': wrong model"):
        await ask(server)
    assert len(server.seen) == 1


async def test_a_full_context_is_told_apart(server):
    server.script = [(400, {"error": {"code": "context_length_exceeded", "message": "too long"}}, {})]
    with pytest.raises(ContextFull, match=r"status 400.*too long"):
        await ask(server)


async def test_no_server_and_no_answer_name_the_url(server):
    server.script = [5.0, 5.0]
    with pytest.raises(EngineError, match=r"completions failed after 1 attempts.*no answer in 0.2 s"):
        await ask(server, timeout_s=0.2, attempts=1)
    server.url = "http://127.0.0.1:9/v1"
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/chat/completions failed after 1 attempts"):
        await ask(server, attempts=1)


@pytest.mark.parametrize("body", [{"choices": []}, {"object": "list"}, [], {"choices": [{"message": None}]}])
async def test_an_answer_of_another_shape_is_an_error(server, body):
    server.script = [body]
    with pytest.raises(EngineError, match="without choices"):
        await ask(server)


async def test_text_that_is_not_json_is_an_error(server):
    server.script = [(200, "<html>", {})]
    with pytest.raises(EngineError, match="not JSON: '<html>'"):
        await ask(server)


async def test_an_image_in_the_answer_is_refused(server):
    server.script = [said([{"type": "image_url"}])]
    with pytest.raises(MessageError, match="image_url"):
        await ask(server)


def test_the_room_imports_without_torch():
    import subprocess
    import sys

    code = "import sys, uni_agent.engines, uni_agent.engines.http; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
