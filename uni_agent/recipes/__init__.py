"""One-file runs that hold all control flow: sft, grpo, ppo, evaluate, rollout. Copy one and edit it.

A recipe is a module with `Config`, `plan(config)` and `run(config)`. What they share stands beside
them: `sections` (config), `session` (an open training run), `world` (names to objects), `measure`.
"""
