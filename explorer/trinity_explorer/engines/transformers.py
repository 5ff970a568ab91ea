"""Generation with plain `transformers`, for machines without vLLM.

Each request owns a stream of uniform numbers drawn from its seed,
so its answer does not depend on its neighbours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from trinity_data.errors import EngineError
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Request, spans_of

log = logging.getLogger(__name__)

# a batch starts once no request has come for this long
QUIET_SECONDS = 0.004
T = TypeVar("T")


@dataclass
class _Waiting:
    request: Request
    done: asyncio.Future[Completion]


class TransformersEngine:
    """Static batches of up to `max_num_seqs` requests, left-padded, with a key-value cache."""

    name = "transformers"

    def __init__(self, model_path: str, *, dtype: str | None, max_num_seqs: int | None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        self.model = model.eval().to(self.device)
        # those of the generation config and the tokenizer's, as vLLM has them
        of_model = model.generation_config.eos_token_id
        ends = {
            *(of_model if isinstance(of_model, list) else [of_model]),
            load_tokenizer(model_path).eos_token_id,
        }
        self.eos_token_ids = torch.tensor(sorted(ends - {None}), device=self.device)
        # on a CPU larger batches are no faster a token, and all of one waits for its longest answer
        self.max_num_seqs = max_num_seqs or (256 if self.device.type == "cuda" else 128)
        self.model_version = 0
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._is_sampling = False
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """For the thread that samples."""

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(request, loop.create_future()) for request in requests]
        self._waiting += waiting
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return [await w.done for w in waiting]

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        load = partial(self._load_weights, Path(weights.folder), weights.version)
        await (self._between_tokens(load) if during else self._between_batches(load))

    async def _between_batches(self, work: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.to_thread(work)

    async def _between_tokens(self, work: Callable[[], T]) -> T:
        """Runs `work` where the model is used, before the next token of the batch under way."""
        if not self._is_sampling:
            return await self._between_batches(work)
        done = Future[T]()
        self._calls.put(lambda: _settle(done, work))
        return await asyncio.wrap_future(done)

    def _run_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    @torch.inference_mode(mode=False)
    def _load_weights(self, folder: Path, version: int) -> None:
        tensors, own = load_weight_files(folder), self.model.state_dict()
        # tied tensors are saved once
        missing = own.keys() - tensors.keys() - set(self.model.get_expanded_tied_weights_keys())
        if missing or any(
            name not in own or tensor.shape != own[name].shape for name, tensor in tensors.items()
        ):
            tensors = self._renamed(folder)
        # those of the engine's number format stay where the file is mapped
        fitting = {name: tensor.to(self.device, own[name].dtype) for name, tensor in tensors.items()}
        self.model.load_state_dict(fitting, strict=False, assign=True)
        self.model.tie_weights()
        self.model_version = version

    def _renamed(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of an architecture whose files name them otherwise
        than its modules: experts one by one.
        """
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.model.dtype, trust_remote_code=False, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:  # the boundary of transformers' loading
            raise EngineError(f"{folder} does not hold this model's weights: {error}") from error
        unfit_keys = sorted([*loading["missing_keys"], *loading["unexpected_keys"]])
        if unfit_keys or type(model) is not type(self.model):
            name = unfit_keys[0] if unfit_keys else type(model).__name__
            raise EngineError(f"{folder} does not hold this model's weights: {name!r} does not fit")
        return dict(model.state_dict())

    async def sleep(self) -> None:
        await self._between_batches(partial(self._move_to, torch.device("cpu")))

    async def wake(self) -> None:
        await self._between_batches(partial(self._move_to, self.device))

    def _move_to(self, device: torch.device) -> None:
        self.model.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._between_tokens(partial(self._score, sequences))

    @torch.inference_mode()
    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """A forward pass for those of each length, so that nothing of padding is in it."""
        scores: dict[int, list[float]] = {}
        for length in dict.fromkeys(map(len, sequences)):
            chosen = [place for place, sequence in enumerate(sequences) if len(sequence) == length]
            ids_BT = torch.tensor([list(sequences[place]) for place in chosen], device=self.device)
            logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
            logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
            scores |= dict(zip(chosen, logprobs_BT.tolist(), strict=True))
        return [scores[place] for place in range(len(sequences))]

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        while self._waiting:
            seen = 0
            while seen < len(self._waiting) < self.max_num_seqs:
                seen = len(self._waiting)
                await asyncio.sleep(QUIET_SECONDS)
            batch, self._waiting = self._waiting[: self.max_num_seqs], self._waiting[self.max_num_seqs :]
            async with self._lock:
                self._is_sampling = True
                try:
                    completions = await asyncio.to_thread(self._sample, [w.request for w in batch])
                # the boundary of torch: out of memory, a token id that there is not
                except Exception as error:
                    for w in batch:
                        if not w.done.done():
                            w.done.set_exception(error)
                    continue
                finally:
                    self._is_sampling = False
                    # that came after the last token
                    await asyncio.to_thread(self._run_calls)
            for w, completion in zip(batch, completions, strict=True):
                if not w.done.done():
                    w.done.set_result(completion)

    @torch.inference_mode()
    def _sample(self, requests: list[Request]) -> list[Completion]:
        draft = _DecodeState(requests, self.device)
        for position in range(max(r.sampling.max_tokens for r in requests)):
            self._run_calls()
            draft.take_version(self.model_version, position)
            output = self.model(
                input_ids=draft.input_ids,
                attention_mask=draft.attention_mask,
                position_ids=draft.position_ids,
                past_key_values=draft.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[:, -1].float()
            if position == 0:
                logits = draft.spread(logits)
            draft.extend(logits, position, self.eos_token_ids)
            if not draft.alive.any():
                break
        return draft.completions()


class _DecodeState:
    """The state of one static batch while it grows by a token at a time."""

    def __init__(self, requests: list[Request], device: torch.device) -> None:
        prompts = list(dict.fromkeys(tuple(r.prompt_token_ids) for r in requests))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        self.prompt_of = torch.tensor([number[tuple(r.prompt_token_ids)] for r in requests], device=device)
        width = max(len(prompt) for prompt in prompts)
        pad = [width - len(prompt) for prompt in prompts]
        self.prompt_ids = torch.tensor(
            [[0] * p + list(prompt) for p, prompt in zip(pad, prompts, strict=True)], device=device
        )
        self.input_ids = self.prompt_ids
        self.attention_mask = torch.tensor([[0] * p + [1] * (width - p) for p in pad], device=device)
        self.position_ids = (self.attention_mask.cumsum(-1) - 1).clamp(min=0)
        self.cache = DynamicCache()
        # of a greedy request nothing is cut, as in vLLM: its log-probs are of the whole distribution
        samplings = [
            replace(r.sampling, top_k=-1, top_p=1.0) if r.sampling.temperature == 0 else r.sampling
            for r in requests
        ]
        self.max_tokens = torch.tensor([s.max_tokens for s in samplings], device=device)
        self.min_tokens = torch.tensor([s.min_tokens for s in samplings], device=device)
        self.temperature = torch.tensor([s.temperature for s in samplings], device=device)
        self.top_k = [s.top_k for s in samplings]
        self.top_p = torch.tensor([s.top_p for s in samplings], device=device)
        longest = max(s.max_tokens for s in samplings)
        draws = np.stack([np.random.default_rng(s.seed).random(longest) for s in samplings])
        self.uniforms = torch.tensor(draws, device=device)
        self.rows = torch.arange(len(requests), device=device)  # which request each batch row serves
        self.alive = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.reports_cuts = [s.reports_cuts for s in samplings]
        self.kept: list[list[list[int] | None]] = [[] for _ in requests]
        self.banned: list[list[list[int] | None]] = [[] for _ in requests]
        self.stopped = [False] * len(requests)
        self.version_starts: list[tuple[int, int]] = []

    def take_version(self, version: int, position: int) -> None:
        """The token at `position` is the first that `version` samples, unless it sampled the one before:
        the next pass is over whole sequences then, to compute keys and values with the new weights.
        """
        if self.version_starts and self.version_starts[-1][1] == version:
            return
        self.version_starts.append((position, version))
        if not position:
            return
        tokens = [self.tokens[row] for row in self.rows.tolist()]
        answers_BT = self.rows.new_tensor([each + [0] * (position - len(each)) for each in tokens])
        self.input_ids = torch.cat([self.prompt_ids[self.prompt_of[self.rows]], answers_BT], dim=1)
        self.position_ids = (self.attention_mask.cumsum(-1) - 1).clamp(min=0)
        self.cache = DynamicCache()

    def spread(self, logits_PV: torch.Tensor) -> torch.Tensor:
        """From a row a prompt to a row a request: the rollouts of a group share the
        pass over their prompt.
        """
        self._select(self.prompt_of)
        return logits_PV[self.prompt_of]

    def _select(self, rows: torch.Tensor) -> None:
        """Goes on with these rows of the batch, in this order."""
        self.cache.batch_select_indices(rows)
        self.attention_mask, self.position_ids = self.attention_mask[rows], self.position_ids[rows]

    def extend(self, logits_BV: torch.Tensor, position: int, eos_token_ids: torch.Tensor) -> None:
        """Samples the next token of every living row and prepares the next forward pass."""
        too_early = position < self.min_tokens[self.rows]
        is_end_V = torch.isin(torch.arange(logits_BV.shape[1], device=logits_BV.device), eos_token_ids)
        logits_BV[too_early[:, None] & is_end_V] = -torch.inf
        tokens_B, logprobs_B, kept_BV = self._draw(logits_BV, position)
        stopped_B = torch.isin(tokens_B, eos_token_ids)
        columns = (self.rows, self.alive, tokens_B, logprobs_B, stopped_B)
        for row, alive, token, logprob, stop in zip(*(each.tolist() for each in columns), strict=True):
            if alive:
                self.tokens[row].append(token)
                self.logprobs[row].append(logprob)
                self.stopped[row] = stop
        self._report_cuts(kept_BV, too_early, eos_token_ids.tolist())
        self.alive = self.alive & ~stopped_B & (position + 1 < self.max_tokens[self.rows])
        self.input_ids = tokens_B[:, None]
        self.position_ids = self.position_ids[:, -1:] + 1
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(self.input_ids)], dim=1)
        if int(self.alive.sum()) * 2 <= len(self.alive) and self.alive.any():
            keep = self.alive.nonzero()[:, 0]
            self._select(keep)
            self.rows, self.alive, self.input_ids = self.rows[keep], self.alive[keep], self.input_ids[keep]

    def _report_cuts(self, kept_BV: torch.Tensor | None, too_early_B: torch.Tensor, ends: list[int]) -> None:
        """Writes down what the newest token of every living row was sampled from."""
        for place, (row, alive) in enumerate(zip(self.rows.tolist(), self.alive.tolist(), strict=True)):
            if not alive or not self.reports_cuts[row]:
                continue
            cut = self.top_k[row] > 0 or float(self.top_p[row]) < 1
            kept = kept_BV[place].nonzero()[:, 0].tolist() if cut and kept_BV is not None else None
            self.kept[row].append(kept)
            self.banned[row].append(ends if kept is None and bool(too_early_B[place]) else None)

    def _draw(
        self, logits_BV: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens, their log-probs, and what the rows' tokens were drawn from if any distribution was cut."""
        temperature_B = self.temperature[self.rows]
        greedy_B = temperature_B == 0
        scaled_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
        uncut_BV = scaled_BV
        scaled_BV = _keep_top(scaled_BV, [self.top_k[r] for r in self.rows.tolist()], self.top_p[self.rows])
        logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
        cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
        uniform_B = self.uniforms[self.rows, position] * cumulative_BV[:, -1]
        sampled_B = torch.searchsorted(cumulative_BV, uniform_B[:, None], right=True)[:, 0].clamp(
            max=logits_BV.shape[1] - 1
        )
        tokens_B = torch.where(greedy_B, scaled_BV.argmax(-1), sampled_B)
        kept_BV = None if scaled_BV is uncut_BV else scaled_BV > -torch.inf
        return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0], kept_BV

    def completions(self) -> list[Completion]:
        return [
            Completion(
                tokens,
                logprobs,
                "stop" if stopped else "length",
                self.version_starts[0][1],
                kept if any(kept) else None,
                banned if any(banned) else None,
                spans_of(self.version_starts, len(tokens)),
            )
            for tokens, logprobs, stopped, kept, banned in zip(
                self.tokens, self.logprobs, self.stopped, self.kept, self.banned, strict=True
            )
        ]


def _keep_top(logits_BV: torch.Tensor, top_k: list[int], top_p_B: torch.Tensor) -> torch.Tensor:
    """Logits with everything outside each row's top-k and top-p nucleus at minus infinity."""
    if all(k <= 0 for k in top_k) and bool((top_p_B >= 1).all()):
        return logits_BV
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    rank_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    k_B = torch.tensor([k if k > 0 else logits_BV.shape[1] for k in top_k], device=logits_BV.device)
    beyond_k_BV = rank_V >= k_B[:, None]
    # the nucleus is one of what top-k left, as in vLLM
    probabilities_BV = ordered_BV.masked_fill(beyond_k_BV, -torch.inf).softmax(-1)
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    outside_BV = beyond_k_BV | (before_BV >= top_p_B[:, None])
    outside_BV[:, 0] = False
    return logits_BV.masked_fill(outside_BV.gather(-1, order_BV.argsort(-1)), -torch.inf)


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    """Gives `done` what `work` returns or raises."""
    try:
        done.set_result(work())
    except Exception as error:  # the caller's to handle
        done.set_exception(error)


def load_weight_files(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors
