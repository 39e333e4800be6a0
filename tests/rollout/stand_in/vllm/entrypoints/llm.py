from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.rl.offline import RLOfflineMixin
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.worker.gpu_worker import Worker


class LLM(RLOfflineMixin):
    made: list[LLM] = []

    def __init__(self, model: str, *, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        args = EngineArgs(model=model, tensor_parallel_size=tensor_parallel_size, **kwargs)
        assert args.load_format == 'dummy' and args.logprobs_mode == 'processed_logprobs' and args.skip_tokenizer_init
        assert os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] == '0'
        self.args, self.events = args, []
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model)).eval()
        self.workers = [Worker(args, rank, self) for rank in range(tensor_parallel_size)]
        self.threads = ThreadPoolExecutor(tensor_parallel_size)
        self.awake, self.asleep = {'weights', 'kv_cache'}, set()
        LLM.made.append(self)

    # ------------------------------------------------------------------ memory

    def sleep(self, level: int = 1, mode: str = 'abort') -> None:
        if self.asleep:  # also where only a part is awake, as older executors do
            return
        assert self.args.enable_sleep_mode and level == 2
        self.events.append(f'sleep {level}')
        self.awake, self.asleep = set(), {'weights', 'kv_cache'}
        for worker in self.workers:
            worker.shards.clear()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags and set(tags) <= self.asleep
        self.events.append(f'wake {tags[0]}')
        self.awake |= set(tags)
        self.asleep -= set(tags)
        return not self.asleep

    # ------------------------------------------------------------------ weights

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        def asked(worker: Worker) -> Any:
            function = method if callable(method) else getattr(Worker, method)
            return function(worker, *args, **(kwargs or {}))

        return list(self.threads.map(asked, self.workers))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        return self.collective_rpc('apply_model', args=(func,))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.events.append('forget')
        return True

    def whole(self) -> Any:
        """The model with the weights that were loaded, all ranks' parts together."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name in self.workers[0].shards:
                own[name].copy_(torch.cat([w.shards[name] for w in self.workers]).view(own[name].shape))
        names = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}  # a tied head wants its own
        missing = names - set(self.workers[0].shards)
        assert not missing, f'no weights for {sorted(missing)[:3]}'
        return self.model

    # ------------------------------------------------------------------ generating

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Any], sampling_params: Sequence[Any] | None = None, *, use_tqdm: Any = True
    ) -> list[RequestOutput]:
        assert self.awake == {'weights', 'kv_cache'} and not any(w.updating for w in self.workers)
        gate = os.environ.get('STAND_IN_GATE')
        while gate and not os.path.exists(gate):
            time.sleep(0.01)
        model, answers = self.whole(), []
        for number, (prompt, p) in enumerate(zip(prompts, sampling_params, strict=True)):
            ids, steps = list(prompt['prompt_token_ids']), []
            generator = torch.Generator().manual_seed(p.seed)
            start = len(ids)
            while len(ids) - start < p.max_tokens:
                logits = model(torch.tensor([ids])).logits[0, -1].float()
                logp = torch.log_softmax(logits / (p.temperature or 1.0), -1)
                token = (
                    int(logp.argmax())
                    if p.temperature == 0
                    else int(torch.multinomial(logp.exp(), 1, generator=generator))
                )
                ids.append(token)
                steps.append({token: Logprob(float(logp[token]))})
                if token in p.stop_token_ids:
                    break
            output = CompletionOutput(0, '', ids[start:], None, steps)
            answers.append(RequestOutput(str(number), None, ids[:start], None, [output], True))
        return answers
