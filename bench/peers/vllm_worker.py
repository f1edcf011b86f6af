# pyright: basic, reportMissingImports=false
"""vLLM on CPU as an arm: its engine in this process, stepped by hand. Runs in bench/.peers/vllm."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from lines import serve
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

Ids = list[int]


class Peer:
    """One model in one engine."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.weights: dict[str, torch.Tensor] = {}
        self.num_requests = 0

    def versions(self) -> dict[str, str]:
        return {"vllm": vllm.__version__, "vllm_torch": torch.__version__}

    def load(self, *, model: str, dtype: str, eager: bool, context: int, prefix_caching: bool) -> float:
        """Make the engine; seconds from construction to the first token."""
        began = time.perf_counter()
        self.llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=context,
            max_num_seqs=64,
            enable_prefix_caching=prefix_caching,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self.first_token([5, 6, 7, 8])
        return time.perf_counter() - began

    def first_token(self, prompt: Ids) -> float:
        """Seconds that one token takes."""
        began = time.perf_counter()
        self.llm.generate([TokensPrompt(prompt_token_ids=prompt)], _sampling(1, 0.0), use_tqdm=False)
        return time.perf_counter() - began

    def generate(self, prompts: list[Ids], new_tokens: int) -> float:
        """Seconds for all prompts, greedy."""
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        began = time.perf_counter()
        done = self.llm.generate(asked, _sampling(new_tokens, 0.0), use_tqdm=False)
        seconds = time.perf_counter() - began
        counts = {len(one.outputs[0].token_ids) for one in done}
        if counts != {new_tokens}:
            raise RuntimeError(f"completions of {sorted(counts)} tokens, asked for {new_tokens}")
        return seconds

    def greedy(self, prompt: Ids, new_tokens: int) -> Ids:
        """The greedy tokens after a prompt."""
        asked = [TokensPrompt(prompt_token_ids=prompt)]
        done = self.llm.generate(asked, _sampling(new_tokens, 0.0), use_tqdm=False)
        return list(done[0].outputs[0].token_ids)

    # --- weights ---

    def hold_weights(self, model: str) -> None:
        """Keep the float32 weights of a folder as those that updates come from."""
        self.weights = {name: w.float() for name, w in load_file(f"{model}/model.safetensors").items()}

    def update(self, change: float, roll: int = 0) -> float:
        """Take the held weights, each times (1 + change), the vocabulary rolled; seconds of the taking."""
        fresh = {name: weight * (1.0 + change) for name, weight in self.weights.items()}
        if roll:
            embedding = "model.embed_tokens.weight"
            fresh[embedding] = fresh[embedding].roll(roll, 0)
        began = time.perf_counter()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(fresh.items())})
        # With tied embeddings the head keeps its packed copy of the old ones unless it is made anew.
        self.llm.apply_model(_pack_head)
        self.llm.reset_prefix_cache()
        return time.perf_counter() - began

    # --- episodes ---

    def episodes(
        self, prompts: list[Ids], observations: list[list[Ids]], new_tokens: int
    ) -> dict[str, float]:
        """Play one episode per prompt: sample, append the next observation, sample, .. each at its own pace.

        Returns seconds and sampled tokens.
        """
        engine = self.llm.llm_engine
        histories = [list(prompt) for prompt in prompts]
        turns = [0] * len(prompts)
        owner: dict[str, int] = {}
        sampling = _sampling(new_tokens, 1.0)
        sampled = 0

        def ask(episode: int) -> None:
            self.num_requests += 1
            name = str(self.num_requests)
            owner[name] = episode
            # the engine keeps the list: it must not see what is appended later
            engine.add_request(name, TokensPrompt(prompt_token_ids=list(histories[episode])), sampling)

        began = time.perf_counter()
        for episode in range(len(prompts)):
            ask(episode)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                episode = owner.pop(output.request_id)
                new = list(output.outputs[0].token_ids)
                sampled += len(new)
                if turns[episode] < len(observations[episode]):
                    histories[episode] += new + observations[episode][turns[episode]]
                    turns[episode] += 1
                    ask(episode)
        return {"seconds": time.perf_counter() - began, "tokens": sampled}


def _pack_head(model: Any) -> None:
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _sampling(new_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=temperature, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    # vLLM's attention uses AMX tiles and asks for leave to only in its own worker processes; without
    # leave the process dies of an illegal instruction
    torch.cpu._init_amx()
    peer = Peer()
    serve(
        {
            "versions": peer.versions,
            "load": peer.load,
            "first_token": peer.first_token,
            "generate": peer.generate,
            "greedy": peer.greedy,
            "hold_weights": peer.hold_weights,
            "update": peer.update,
            "episodes": peer.episodes,
        }
    )
