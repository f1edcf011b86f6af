"""The article's example, end to end: 1,000 episodes, one training pass, the same runtime afterwards.

.venv/bin/python examples/article.py [NUM_EPISODES]
"""

import asyncio
import sys
from pathlib import Path

from uni_agent import AgentPolicy, AgentRuntime, EnvRegistry, PPOTrainer, RewardModel

MODEL = Path(__file__).parent / "code_repair" / "base"
tasks = [f"train-0-{number}" for number in range(250)]
num_episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000

EnvRegistry.register(name="code_debug_env", entry_point="uni_agent.envs.CodeDebugEnv", max_steps=5)
policy = AgentPolicy(model_path=MODEL, tools=["code_executor"])
runtime = AgentRuntime(policy=policy, env_name="code_debug_env")
trajectories = asyncio.run(runtime.batch_rollout(tasks, num_episodes=num_episodes))
reward_model = RewardModel(reward_fn="code_test_pass_rate")
trainer = PPOTrainer(policy=policy, reward_model=reward_model, kl_ctrl=0.02)
metrics = trainer.train(trajectories=trajectories, epochs=1)
# policy is updated: the runtime's next rollout uses the new weights
again = asyncio.run(runtime.batch_rollout(tasks[:8], num_episodes=8))

print(f"{len(trajectories)} episodes, reward {metrics['rollout/reward_mean']:.3f}, version {policy.version}")
print(f"the next rollout was sampled by version {again[0].oldest_version}")
policy.close()
