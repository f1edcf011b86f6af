"""Engines: token ids in; ids, logprobs and policy versions out.

`engines.local` runs a Hugging Face module in this process (imports torch), `engines.http` asks any
OpenAI-compatible chat endpoint (messages, not tokens: its episodes are not trainable). Import the
module you need; this file imports neither.
"""
