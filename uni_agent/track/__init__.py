"""The run directory and what is shown while a run works: metrics, spans, logs, sinks, live lines.

In: names and numbers, handed over by a recipe. Out: files under `runs/<name>/` that every viewer
reads. This room must not know engines or learners, and has no numbers of its own.
"""

from uni_agent.track.jsonl import JsonlWriter, Records, read_jsonl
from uni_agent.track.live import LiveConsole
from uni_agent.track.run import Metrics, Run, plain_json, read_metrics
from uni_agent.track.sinks import GuardedSink, Sink, TensorboardSink, WandbSink
from uni_agent.track.text import clean_text

__all__ = [
    "GuardedSink",
    "JsonlWriter",
    "LiveConsole",
    "Metrics",
    "Records",
    "Run",
    "Sink",
    "TensorboardSink",
    "WandbSink",
    "clean_text",
    "plain_json",
    "read_jsonl",
    "read_metrics",
]
