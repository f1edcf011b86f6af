"""The scribe writes down exactly what the engine sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from uni_agent.errors import ContextFull, EngineError
from uni_agent.protocols import ChatRequest
from uni_agent.rollout import Scribe, TokenBudgetSpent
from uni_agent.testing import Scripted, ScriptedEngine, ToyRenderer, ToyTokenizer
from uni_agent.types import (
    Chunk,
    Completion,
    Message,
    Sampling,
    ToolResult,
    ToolSpec,
    Trajectory,
    derive_seed,
)

Q = Message("user", "q")


def scribe_of(
    engine: ScriptedEngine,
    renderer: ToyRenderer | None = None,
    sampling: Sampling | None = None,
    max_tokens: int | None = None,
) -> Scribe:
    return Scribe(
        engine,
        renderer or ToyRenderer(),
        sampling or Sampling(20),
        session="0/t/0",
        seed=7,
        max_tokens=max_tokens,
    )


def check_exact(trajectories: Sequence[Trajectory], prompts: Sequence[Sequence[int]]) -> None:
    """Every sampled token stands in the context that the engine got, and in one trajectory."""
    spans: list[tuple[list[int], list[int]]] = []
    for trajectory in trajectories:
        ids = trajectory.token_ids.tolist()
        spans += [(ids[: turn.sampled[0]], ids[slice(*turn.sampled)]) for turn in trajectory.turns]
    assert sorted(context for context, _ in spans) == sorted(list(prompt) for prompt in prompts)


async def test_t01_sampled_ids_are_appended_never_encoded_again() -> None:
    engine = ScriptedEngine(
        [Scripted([14, 15, 2], [-0.1, -0.2, -0.3]), Scripted([19, 2], [-0.4, -0.5], version=3)]
    )
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    assert first.message.content == "hello"
    await scribe.chat(ChatRequest((Q, first.message, Message("tool", "x"))))

    (row,) = scribe.trajectories()
    start = len(engine.prompts[0])
    assert engine.prompts[1][: start + 3] == engine.prompts[0] + [14, 15, 2]
    assert row.token_ids.tolist() == engine.prompts[1] + [19, 2]
    assert 16 not in row.token_ids
    assert row.token_ids[row.sampled].tolist() == [14, 15, 2, 19, 2]
    np.testing.assert_array_equal(row.logprobs[row.sampled], np.float32([-0.1, -0.2, -0.3, -0.4, -0.5]))
    assert not row.logprobs[~row.sampled].any()
    assert row.versions[row.sampled].tolist() == [0, 0, 0, 3, 3]
    assert (row.versions[~row.sampled] == -1).all()
    assert row.turns[1].observation == (start + 3, len(engine.prompts[1]))
    assert row.turns[1].observed == (Message("tool", "x"),)


async def test_t02_a_format_that_drops_thinking_starts_a_new_tape() -> None:
    thought = Scripted([21, 19, 22, 20, 2])  # <think>a</think>b
    engine = ScriptedEngine([thought, Scripted([20, 2])])
    scribe = scribe_of(engine, ToyRenderer(strips_thinking=True))
    first = await scribe.chat(ChatRequest((Q,)))
    await scribe.chat(ChatRequest((Q, first.message, Message("user", "x"))))

    rows = scribe.trajectories()
    assert [row.token_ids[row.sampled].tolist() for row in rows] == [[21, 19, 22, 20, 2], [20, 2]]
    check_exact(rows, engine.prompts)
    assert 21 not in rows[1].token_ids
    assert 17 in engine.prompts[1]  # the second user's text was there


@pytest.mark.parametrize("finish", ["length", "stop"])
async def test_t04_no_closing_token_is_trained(finish: str) -> None:
    engine = ScriptedEngine([Scripted([10, 11], finish=finish), Scripted([19, 2])])  # pyright: ignore
    scribe = scribe_of(engine, sampling=Sampling(2))
    first = await scribe.chat(ChatRequest((Q,)))
    assert first.finish == finish
    await scribe.chat(ChatRequest((Q, first.message, Q)))

    (row,) = scribe.trajectories()
    assert row.token_ids[row.sampled].tolist() == [10, 11, 19, 2]
    end = row.turns[0].sampled[1]
    assert row.token_ids[end] == 2  # closed for structure
    assert not row.sampled[end]
    assert row.logprobs[end] == 0
    assert row.versions[end] == -1


async def test_t08_ids_and_logprobs_end_where_the_stop_string_ended() -> None:
    words = {"</": 30, "done": 31, ">x": 32, "z": 33}
    engine = ScriptedEngine([Scripted([19, 30, 31, 32], [-0.1, -0.2, -0.3, -0.4])])
    scribe = scribe_of(engine, ToyRenderer(ToyTokenizer(words)), Sampling(20, stop=("</done>",)))
    reply = await scribe.chat(ChatRequest((Q,)))
    (row,) = scribe.trajectories()
    assert reply.finish == "stop"
    assert row.token_ids[row.sampled].tolist() == [19, 30, 31, 32]
    assert row.sampled.sum() == len(row.logprobs[row.sampled]) == 4
    assert 33 not in row.token_ids
    assert engine.samplings[0].stop == ("</done>",)


async def test_t12_both_turns_train_their_stop_id_once() -> None:
    engine = ScriptedEngine([Scripted([19, 2]), Scripted([20, 2])])
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    await scribe.chat(ChatRequest((Q, first.message, Message("tool", "x"))))
    (row,) = scribe.trajectories()
    ends = [turn.sampled[1] - 1 for turn in row.turns]
    assert [row.token_ids[end] for end in ends] == [2, 2]
    assert row.sampled[ends].all()
    # user, tool: closed as context; two assistant turns: closed by what was sampled
    assert (row.token_ids == 2).sum() == 4
    assert ((row.token_ids == 2) & row.sampled).sum() == 2


@pytest.mark.parametrize(("length", "sent"), [(70, 20), (90, 10), (99, 1), (100, None), (130, None)], ids=str)
async def test_x02_max_tokens_fits_the_window(length: int, sent: int | None) -> None:
    engine = ScriptedEngine([Scripted([19] * 30)], context_size=100)
    scribe = scribe_of(engine)
    request = ChatRequest((Message("user", "x" * (length - 8)),))
    if sent is None:
        with pytest.raises(ContextFull, match=f"{length} tokens"):
            await scribe.chat(request)
        assert engine.prompts == []
        assert scribe.trajectories() == ()
    else:
        reply = await scribe.chat(request)
        assert len(engine.prompts[0]) == length
        assert engine.samplings[0].max_tokens == sent == reply.completion_tokens


async def test_the_episode_budget_is_shared_by_its_turns() -> None:
    engine = ScriptedEngine([Scripted([19] * 30), Scripted([19] * 30)])
    scribe = scribe_of(engine, max_tokens=25)
    first = await scribe.chat(ChatRequest((Q,)))
    history = (Q, first.message, Q)
    second = await scribe.chat(ChatRequest(history))
    with pytest.raises(TokenBudgetSpent, match="25"):
        await scribe.chat(ChatRequest((*history, second.message, Q)))
    assert [s.max_tokens for s in engine.samplings] == [20, 5]


async def test_x04_an_empty_response_adds_no_token() -> None:
    engine = ScriptedEngine([Scripted([]), Scripted([2])])
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    assert (first.message.content, first.completion_tokens) == ("", 0)
    await scribe.chat(ChatRequest((Q, first.message, Q)))
    (row,) = scribe.trajectories()
    assert row.token_ids[row.sampled].tolist() == [2]
    assert [turn.sampled[1] - turn.sampled[0] for turn in row.turns] == [0, 1]


async def test_w01_versions_are_kept_per_token() -> None:
    engine = ScriptedEngine([Scripted([19, 20, 19, 2], version=[3, 3, 4, 4])])
    scribe = scribe_of(engine)
    await scribe.chat(ChatRequest((Q,)))
    (row,) = scribe.trajectories()
    assert row.versions[row.sampled].tolist() == [3, 3, 4, 4]


async def test_rewritten_history_starts_a_tape_and_each_token_trains_once() -> None:
    engine = ScriptedEngine([Scripted([19, 2]), Scripted([20, 2]), Scripted([17, 2])])
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    rewritten = replace(first.message, content="hello")
    second = await scribe.chat(ChatRequest((Q, rewritten, Q)))
    await scribe.chat(ChatRequest((Q, rewritten, Q, second.message, Q)))
    rows = scribe.trajectories()
    assert [row.token_ids[row.sampled].tolist() for row in rows] == [[19, 2], [20, 2, 17, 2]]
    check_exact(rows, engine.prompts)


async def test_equal_messages_continue_the_tape_though_they_are_other_objects() -> None:
    engine = ScriptedEngine([Scripted([14, 15, 2]), Scripted([19, 2])])
    scribe = scribe_of(engine)
    await scribe.chat(ChatRequest((Q,)))
    await scribe.chat(ChatRequest((Message("user", "q"), Message("assistant", "hello"), Q)))
    assert len(scribe.trajectories()) == 1


async def test_other_tools_and_other_agents_have_tapes_of_their_own() -> None:
    engine = ScriptedEngine([Scripted([19, 2])] * 4)
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    await scribe.chat(ChatRequest((Q,), agent="judge"))
    more = (Q, first.message, Q)
    second = await scribe.chat(ChatRequest(more))  # the judge did not close the main tape
    await scribe.chat(ChatRequest((*more, second.message, Q), tools=(ToolSpec("f", "", {}),)))
    rows = scribe.trajectories()
    assert [(row.agent, len(row.turns)) for row in rows] == [("main", 2), ("judge", 1), ("main", 1)]
    check_exact(rows, engine.prompts)


async def test_calls_at_the_same_time_never_share_a_tape() -> None:
    engine = ScriptedEngine([Scripted([19, 2])] * 3, latency_s=0.01)
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    more = ChatRequest((Q, first.message, Q))
    await asyncio.gather(scribe.chat(more), scribe.chat(more))
    rows = scribe.trajectories()
    assert sum(int(row.sampled.sum()) for row in rows) == 6
    check_exact(rows, engine.prompts)


async def test_a_cut_turn_keeps_its_text_and_loses_its_calls() -> None:
    renderer = ToyRenderer()
    ids = renderer.tokenizer.encode('a<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    scribe = scribe_of(ScriptedEngine([Scripted(ids, finish="length")]), sampling=Sampling(200))
    reply = await scribe.chat(ChatRequest((Q,)))
    assert (reply.message.content, reply.message.tool_calls, reply.finish) == ("a", (), "length")


async def test_turns_have_derived_seeds_and_the_renderers_stop_ids() -> None:
    engine = ScriptedEngine([Scripted([19, 2])] * 2)
    scribe = scribe_of(engine, sampling=Sampling(20, stop_token_ids=(9, 2)))
    first = await scribe.chat(ChatRequest((Q,)))
    await scribe.chat(ChatRequest((Q, first.message, Q)))
    assert [s.seed for s in engine.samplings] == [derive_seed(7, 0), derive_seed(7, 1)]
    assert engine.samplings[0].stop_token_ids == (9, 2)
    (row,) = scribe.trajectories()
    assert [turn.sampling for turn in row.turns] == engine.samplings


async def test_record_attaches_to_the_latest_turn() -> None:
    scribe = scribe_of(ScriptedEngine([Scripted([19, 2])] * 2))
    scribe.record((), 5.0)  # before any turn: nothing to attach to
    first = await scribe.chat(ChatRequest((Q,)))
    result = ToolResult("c", "f", "x")
    scribe.record((result,), 0.25)
    await scribe.chat(ChatRequest((Q, first.message, Q)))
    (row,) = scribe.trajectories()
    assert [turn.reward for turn in row.turns] == [0.25, None]
    assert row.turns[0].tool_results == (result,)


async def test_an_engine_error_leaves_the_tape_as_it_was() -> None:
    engine = ScriptedEngine([Scripted([19, 2]), EngineError("gone"), Scripted([20, 2])])
    scribe = scribe_of(engine)
    first = await scribe.chat(ChatRequest((Q,)))
    request = ChatRequest((Q, first.message, Q))
    with pytest.raises(EngineError, match="gone"):
        await scribe.chat(request)
    await scribe.chat(request)
    (row,) = scribe.trajectories()
    assert row.token_ids[row.sampled].tolist() == [19, 2, 20, 2]


@pytest.mark.parametrize(
    ("scripted", "said"),
    [
        (Scripted([19, 2], [-0.1, float("nan")]), "not finite"),
        (Scripted([19, 2], [-0.1, -float("inf")]), "not finite"),
    ],
)
async def test_logprobs_that_are_not_finite_are_the_engines_error(scripted: Scripted, said: str) -> None:
    scribe = scribe_of(ScriptedEngine([scripted]))
    with pytest.raises(EngineError, match=said):
        await scribe.chat(ChatRequest((Q,)))
    assert scribe.trajectories() == ()


class SlowEngine(ScriptedEngine):
    """Yields two tokens, then never ends."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str
    ) -> AsyncIterator[Chunk | Completion]:
        for token in (19, 20):
            yield Chunk(np.int32([token]), np.float32([-0.5]), np.int32([1]))
        await asyncio.Event().wait()


async def test_a_cancelled_call_keeps_what_was_sampled() -> None:
    scribe = scribe_of(SlowEngine([]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scribe.chat(ChatRequest((Q,))), 0.05)
    (row,) = scribe.trajectories()
    assert row.token_ids[row.sampled].tolist() == [19, 20]
    assert row.turns[0].finish == "cancelled"


async def test_close_ends_the_session() -> None:
    engine = ScriptedEngine([])
    await scribe_of(engine).close()
    assert engine.sessions_ended == ["0/t/0"]
