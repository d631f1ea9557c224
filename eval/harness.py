"""lm-evaluation-harness's view of a model: `WideLM` answers its three kinds of requests.

Token ids, truncation and stop rules are those of the harness's own Hugging Face wrapper
(`lm_eval.models.huggingface.HFLM`), so that numbers compare; the model runs through
`eval.scoring` and `eval.continuation`, so that they do not depend on batch size or order.
Needs the `eval` extra.
"""

import collections
import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from eval.continuation import continue_prompts
from eval.scoring import default_routing, score_windows
from eval.store import Answered, RequestStore, request_key
from eval.windows import Window, rolling_windows
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Routing
from wide_jax.sampling import Sampler

KEPT_TOKENS = 4096  # of a task's own text
MAX_GEN_TOKS = 256  # the wrapper's default for tasks that do not say


@dataclasses.dataclass(frozen=True)
class HarnessConfig:
    """How requests are run; none of it changes an answer but `max_length`.

    Attributes:
        batch_size: rows of a device batch.
        max_length: longest row; None: the model's `max_position_embeddings`.
        progress: show a bar.
    """

    batch_size: int = 8
    max_length: int | None = None
    progress: bool = True


class WideLM(TemplateLM):
    """A model and its tokenizer, as the harness wants them.

    Args:
        model: with or without routers.
        tokenizer: a `transformers` tokenizer.
        config: batch size and lengths.
        routing: by default the routers' argmax, or everything on in a model without routers.
        name: of the model, in the harness's result files.

    `store` holds the answers and what ran; give each task its own. `text` are the first ids that
    were asked about since it was emptied, for whoever wants to run the same tokens again.
    """

    backend = "causal"

    def __init__(
        self,
        model: WideForCausalLM,
        tokenizer: Any,
        *,
        config: HarnessConfig | None = None,
        routing: Routing | None = None,
        name: str = "wide-jax",
    ):
        super().__init__()
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.settings = HarnessConfig() if config is None else config
        self.routing = default_routing(model) if routing is None else routing
        self.store = RequestStore(None, {})
        self.text: list[int] = []
        limit = model.config.max_position_embeddings
        self.max_length = self.settings.max_length or limit
        if not 2 <= self.max_length <= limit:
            raise ValueError(
                f"max_length={self.max_length} must lie between 2 and the model's "
                f"max_position_embeddings={limit}"
            )

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-sequence id."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without context: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's request cache."""
        return self.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids with the tokenizer's own special tokens, unless told or already in the text."""
        settings = {"verbose": False}
        if add_special_tokens is not None:
            settings["add_special_tokens"] = add_special_tokens
        elif string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            settings["add_special_tokens"] = False
        return self.tokenizer.encode(string, **settings)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as one prompt string; a template that has no system role drops it."""
        from jinja2.exceptions import TemplateError

        def render(messages: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return render(chat_history)
        except TemplateError:
            return render([m for m in chat_history if m["role"] != "system"])

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would give it."""
        windows = []
        for (_, text), context, continuation in requests:
            if not continuation:
                raise ValueError(f"a continuation has no tokens: {text!r}")
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, more than "
                    f"max_length={self.max_length}: {text[:60]!r}..."
                )
            windows.append(_continuation_window(context, continuation, self.max_length))
        scores = self._score(windows, "loglikelihood", share=True)
        return [(total, greedy) for total, greedy in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole documents, every token scored once (`rolling_windows`)."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            cut = rolling_windows(ids, self.max_length, self.prefix_token_id)
            windows += cut
            owners += [owner] * len(cut)
        totals = np.zeros(len(requests))
        for owner, (total, _) in zip(
            owners, self._score(windows, "loglikelihood_rolling", share=False), strict=True
        ):
            totals[owner] += total
        return totals.tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt up to the first of its stop strings."""
        jobs, repeats = [], collections.Counter()
        for request in requests:
            job = self._generation(request)
            if job.sampler.temperature > 0:  # a repeated request asks for another draw
                repeats[job.key] += 1
                job = dataclasses.replace(job, key=f"{job.key}-{repeats[job.key]}")
            jobs.append(job)
            self._keep(job.prompt)
        answers = self.store.answers()
        todo: dict[str, _Generation] = {job.key: job for job in jobs if job.key not in answers}
        bar = self._bar(len(jobs), "generate_until", len(jobs) - len(todo))
        for rows, batch in _generation_batches(list(todo.values()), self.settings.batch_size):
            self.store.add(self._generate(batch, rows))
            bar.update(len(batch))
        bar.close()
        answers = self.store.answers()
        return [answers[job.key] for job in jobs]

    def _score(
        self, windows: Sequence[Window], kind: str, *, share: bool
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of the scored targets, all of them greedy) of each window, in order."""
        for window in windows:
            self._keep(window.inputs)
        keys = [_window_key(kind, window) for window in windows]
        answers = self.store.answers()
        todo = {key: w for key, w in zip(keys, windows, strict=True) if key not in answers}
        names = list(todo)
        bar = self._bar(len(windows), kind, len(windows) - len(todo))
        for batch in score_windows(
            self.model,
            list(todo.values()),
            routing=self.routing,
            batch_size=self.settings.batch_size,
            limit=self.max_length,
            share=share,
        ):
            found = {}
            for index, score in zip(batch.indices, batch.scores, strict=True):
                total = float(score.log_probs.astype(np.float64).sum())
                if not np.isfinite(total):
                    raise FloatingPointError(
                        "a log-likelihood is not finite; check the weights (wide check) and the "
                        "dtype"
                    )
                found[names[index]] = [total, bool(score.greedy.all())]
            self.store.add(Answered(found, batch.ran))
            bar.update(len(found))
        bar.close()
        answers = self.store.answers()
        return [(answers[key][0], answers[key][1]) for key in keys]

    def _generation(self, request: Instance) -> "_Generation":
        context, given = request.args
        settings: dict[str, Any] = {**normalize_gen_kwargs(given, MAX_GEN_TOKS)}
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = tuple(handle_stop_sequences(settings.get("until"), eos=eos))
        new = settings["max_gen_toks"]
        if new >= self.max_length:
            raise ValueError(
                f"max_gen_toks={new} leaves no room for a prompt in max_length={self.max_length}"
            )
        known = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(f"generation settings not supported: {', '.join(unknown)}")
        prompt = self.tok_encode(context)[-(self.max_length - new) :]
        sampler = Sampler(temperature=0.0)
        if settings["do_sample"]:
            sampler = Sampler(
                temperature=float(settings.get("temperature", 1.0)),
                top_k=settings.get("top_k"),
                top_p=settings.get("top_p"),
                min_p=settings.get("min_p"),
            )
        key = request_key("generate_until", prompt, until, new, dataclasses.astuple(sampler))
        return _Generation(key, prompt, until, new, sampler)

    def _generate(self, batch: "list[_Generation]", rows: int) -> Answered:
        first = batch[0]

        def text_of(tokens: Sequence[int]) -> str:
            return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

        made = continue_prompts(
            self.model,
            [job.prompt for job in batch],
            max_new_tokens=first.max_new_tokens,
            stop_ids=sorted({self.eot_token_id, *self.model.config.eos_token_ids}),
            stopped=lambda tokens: any(stop in text_of(tokens) for stop in first.until if stop),
            routing=self.routing,
            sampler=first.sampler,
            seeds=[zlib.crc32(job.key.encode()) for job in batch],
            rows=rows,
        )
        answers = {
            job.key: postprocess_generated_text(text_of(tokens), list(job.until), None)
            for job, tokens in zip(batch, made.tokens, strict=True)
        }
        return Answered(answers, made.prefill, made.decode)

    def _keep(self, ids: Sequence[int] | np.ndarray) -> None:
        self.text += [int(i) for i in ids[: KEPT_TOKENS - len(self.text)]]

    def _bar(self, total: int, kind: str, done: int) -> tqdm:
        return tqdm(total=total, initial=done, desc=kind, disable=not self.settings.progress)


@dataclasses.dataclass(frozen=True)
class _Generation:
    key: str
    prompt: list[int]
    until: tuple[str, ...]
    max_new_tokens: int
    sampler: Sampler


def _generation_batches(
    jobs: list[_Generation], size: int
) -> Iterator[tuple[int, list[_Generation]]]:
    """Jobs of equal settings, longest prompts first, and the rows that all their batches have."""
    groups: dict[Any, list[_Generation]] = {}
    for job in jobs:
        groups.setdefault((job.until, job.max_new_tokens, job.sampler), []).append(job)
    for members in groups.values():
        members.sort(key=lambda job: (-len(job.prompt), job.key))
        for start in range(0, len(members), size):
            yield min(size, len(members)), members[start : start + size]


def _continuation_window(context: list[int], continuation: list[int], limit: int) -> Window:
    """The continuation's tokens after as much of the context as fits, cut on the left."""
    line = np.asarray([*context, *continuation], np.int32)[-(limit + 1) :]
    scored = np.arange(len(line) - 1) >= len(line) - 1 - len(continuation)
    return Window(line[:-1], line[1:], scored)


def _window_key(kind: str, window: Window) -> str:
    return request_key(kind, window.inputs.tolist(), window.targets[window.scored].tolist())
