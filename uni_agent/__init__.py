"""uni_agent: build an LLM agent, run it thousands of times at once, train it from its own episodes."""
