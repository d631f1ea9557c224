"""`calibrate_main` and `recover_main`: a whole run in its folder, started, killed and resumed.

A run folder holds `config.yaml` (resolved), `metrics.jsonl`, `tensorboard/`, `checkpoints/` and, at
the end, `model/`: a WIDE model folder that names its base (with a PEFT adapter after stage 2).
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train import metrics
from train.checkpoint import CheckpointMismatchError, Checkpoints
from train.corpus import Recipe, TokenCache, kind_of, token_cache
from train.data import PackedRows, PaddedRows, Rows, ShuffledBatches, local_rows
from train.evaluate import HeldOut, make_evaluation, make_skips
from train.flops import peak_flops, step_flops_per_token
from train.loop import TrainState, run_updates
from train.parts import ModelParts, Params, place, take_apart
from train.records import LossNotFiniteError, UpdateRecord, check_finite, to_record
from train.run_config import (
    INHERITED,
    CalibrateConfig,
    RecoverConfig,
    differences,
    dump,
    load,
    to_dict,
)
from train.step import StepMetrics, init_optimizer, make_step
from train.threshold import Shift, SpreadRows, absorb_thresholds, meet_target
from train.variants import is_trained, prepare_routers, wide_config
from wide_jax import lora, partition
from wide_jax.config import WideConfig
from wide_jax.hf.cache import cache_dir
from wide_jax.hf.config import read_config
from wide_jax.hf.mapping import is_router
from wide_jax.hf.peft import LoRA
from wide_jax.hf.pretrained import from_pretrained, tensors_of
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.tokenizer import load_tokenizer
from wide_jax.hf.wide_folder import WideInfo, base_folder, load_wide_info, save_wide_model
from wide_jax.lora import LoRASettings
from wide_jax.model import WideForCausalLM
from wide_jax.params import LoRAParam, RouterParam
from wide_jax.routing import Module

CONFIG = "config.yaml"


@dataclasses.dataclass(frozen=True)
class RunEvents:
    """What to call while a run goes on; every one may be left out.

    `starting` is called before the first update, if one is left, with a function that compiles it
    without running it. `record` is called for every update, `logged` every `log_every` of them with
    the values of the line in `metrics.jsonl`.
    """

    message: Callable[[str], None] = lambda text: None
    starting: Callable[[Callable[[], None]], None] = lambda compile_step: None
    record: Callable[[UpdateRecord, CalibrateConfig], None] = lambda record, config: None
    logged: Callable[[int, Mapping[str, Any]], None] = lambda update, values: None
    held_out: Callable[[int, HeldOut], None] = lambda update, result: None
    tokenised: Callable[[int, int], None] = lambda documents, tokens: None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Where a finished run left its model, and its last numbers."""

    model_folder: Path
    last: UpdateRecord | None  # None: the run had been finished already
    held_out: HeldOut | None


def calibrate_main(config: CalibrateConfig, events: RunEvents | None = None) -> RunResult:
    """Stage 1: routers on a frozen model, into `config.out`. Called again, it resumes.

    Raises:
        ValueError: settings that do not fit each other, the model or the mesh.
        CheckpointMismatchError: the run folder belongs to another run.
        LossNotFiniteError: the loss broke; says where and what to restart from.
    """
    return _main(config, events or RunEvents(), _load_for_calibration)


def recover_main(config: RecoverConfig, events: RunEvents | None = None) -> RunResult:
    """Stage 2: LoRA and routers of a finished stage 1 (`config.run`), into `config.out`.

    Raises:
        As `calibrate_main`.
    """
    return _main(config, events or RunEvents(), _load_for_recovery)


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A model ready to be trained."""

    model: WideForCausalLM
    folder: Path  # the base's: tokenizer and dense weights
    trained: tuple[type[nnx.Variable], ...]
    keep: Callable[[str], bool]
    config: CalibrateConfig  # with what the model's own folder decides filled in
    lora: LoRASettings | None = None
    absorbed: Mapping[Module, float] = dataclasses.field(default_factory=dict)


def _load_for_calibration(config: CalibrateConfig, mesh: Mesh) -> _Loaded:
    folder = resolve_model(config.model)
    architecture = read_config(base_folder(folder))
    wide = wide_config(
        architecture,
        config.method,
        attn_group_size=config.attn_group_size,
        ffn_group_size=config.ffn_group_size,
        router_rank=config.router_rank,
    )
    partition.check_mesh(mesh, architecture, wide)
    model = _read(folder, config, mesh, wide)
    prepare_routers(model, config.method, config.routed)
    keep = functools.partial(is_trained, method=config.method, routed=config.routed)
    return _Loaded(model, base_folder(folder), (RouterParam,), keep, config)


def _stage_1(config: RecoverConfig) -> Path:
    """The model folder of the stage 1 that stage 2 goes on from."""
    if config.run is None:
        raise ValueError("name the run folder of stage 1 (--run)")
    if not (config.run / "wide_config.json").exists() and not (config.run / "model").is_dir():
        raise FileNotFoundError(
            f"{config.run} holds no finished stage 1 (no model/ in it): finish it by running "
            "its `wide calibrate` command again"
        )
    return config.run / "model" if (config.run / "model").is_dir() else config.run


def _inherit(config: RecoverConfig, info: WideInfo) -> RecoverConfig:
    """The config with what stage 1 decides: what routers there are and which of them train.

    Raises:
        ValueError: the config asks for something else.
    """
    decided: dict[str, Any] = {
        "method": info.training.get("method", config.method),
        "target": info.training.get("target", config.target),
        "attn_group_size": info.wide.attn_group_size,
        "ffn_group_size": info.wide.ffn_group_size,
        "router_rank": info.wide.router_rank,
    }
    assert set(decided) == set(INHERITED)
    defaults = RecoverConfig()
    other = [
        f"{name}={asked!r}, not {value!r}"
        for name, value in decided.items()
        if (asked := getattr(config, name)) not in (value, getattr(defaults, name))
    ]
    if other:
        raise ValueError(f"stage 2 keeps the routers of its stage 1: {'; '.join(other)}")
    return dataclasses.replace(config, **decided)


def _load_for_recovery(config: RecoverConfig, mesh: Mesh) -> _Loaded:
    folder = _stage_1(config)
    info = load_wide_info(folder)
    if info.lora is not None:
        raise ValueError(f"{folder} has had its stage 2 ({info.lora} LoRA): start from stage 1")
    config = _inherit(config, info)
    aimed, aims = (info.budget, dict(info.targets)), (config.budget, _targets(config))
    if aimed != aims and not config.freeze_routers and not config.retarget:
        raise ValueError(
            f"stage 1 aimed at budget {aimed[0]} with targets {aimed[1]}, this stage 2 at "
            f"{aims[0]} with {aims[1]}: set budget and sparsity to the same, or ask to retarget"
        )
    architecture = read_config(base_folder(folder))
    partition.check_mesh(mesh, architecture, info.wide)
    model = _read(folder, config, mesh, None)
    absorbed = absorb_thresholds(model)
    settings = LoRASettings(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        rank_stabilised=config.lora_rank_stabilised,
    )
    lora.attach(model, settings, rngs=nnx.Rngs(config.seed))
    trained = (LoRAParam,) if config.freeze_routers else (LoRAParam, RouterParam)
    keep = functools.partial(is_trained, method=config.method, routed=config.routed)
    return _Loaded(model, base_folder(folder), trained, keep, config, settings, absorbed)


def _read(
    folder: Path, config: CalibrateConfig, mesh: Mesh, wide: WideConfig | None
) -> WideForCausalLM:
    """Weights straight from the file to their places on the mesh."""
    return from_pretrained(
        folder,
        dtype=config.dtype,
        wide=wide,
        kernels=None,  # training differentiates
        seed=config.seed,
        sharding_for=functools.partial(partition.sharding_for, mesh=mesh),
    )


def check_start(config: CalibrateConfig) -> bool:
    """Find now what would stop the run after its weights are read; whether it has begun before.

    Raises:
        ValueError: no folder, no data, or data of an unknown kind.
        FileNotFoundError: a data file or a stage 1 that is not there.
        CheckpointMismatchError: the run folder belongs to another run.
        FileExistsError: the run folder holds something else.
    """
    if config.out is None:
        raise ValueError("name the run folder (--out)")
    if not config.data:
        raise ValueError("name the data: files or a hub id (--data)")
    out = Path(config.out).absolute()
    begun = _check_folder(out, config)
    if _is_finished(out):
        return begun
    if isinstance(config, RecoverConfig):
        _stage_1(config)
        if config.model is not None:
            raise ValueError("stage 2 takes its model from stage 1: name that with --run alone")
    for data in (config.data, config.evaluation_data):
        if data:
            kind_of(data)
    return begun


def _is_finished(out: Path) -> bool:
    return (out / "model" / "wide_config.json").exists()


def _main(config: Any, events: RunEvents, load_model: Callable[[Any, Mesh], _Loaded]) -> RunResult:
    check_start(config)
    if config.distributed:
        start_processes()
    out = Path(config.out).absolute()
    if _is_finished(out):
        events.message(f"{out} is finished: its model is in {out / 'model'}")
        return RunResult(out / "model", None, None)
    mesh = partition.make_mesh(config.data_parallel, config.fsdp, config.tensor_parallel)
    loaded = load_model(config, mesh)
    if loaded.absorbed:
        values = ", ".join(f"{module} {value:+.3f}" for module, value in loaded.absorbed.items())
        events.message(f"the dialled thresholds ({values}) are taken into the routers' biases")
    config = loaded.config
    tokenizer = load_tokenizer(loaded.folder)
    rows = _rows(config.data, config.text_field, config, tokenizer, events)
    held_out_rows = None
    if config.evaluation_data:
        field = config.evaluation_text_field or config.text_field
        held_out_rows = _rows(config.evaluation_data, field, config, tokenizer, events)
    if jax.process_index() == 0 and not (out / CONFIG).exists():
        out.mkdir(parents=True, exist_ok=True)
        dump(config, out / CONFIG)
    with jax.set_mesh(mesh):
        return _train(loaded, rows, held_out_rows, out, mesh, events)


def start_processes() -> None:
    """Join the run's other processes: Slurm, Kubernetes and Open MPI are recognised by JAX.

    Elsewhere set JAX_COORDINATOR_ADDRESS (`host:port`), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        ValueError: only some of these are set.
    """
    if jax.distributed.is_initialized():
        return
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [os.environ.get(name) for name in names]
    if not any(given):
        jax.distributed.initialize()
        return
    address, count, number = given
    if address is None or count is None or number is None:
        missing = [name for name, value in zip(names, given, strict=True) if value is None]
        raise ValueError(f"multi-process start: {', '.join(missing)} must be set too")
    jax.distributed.initialize(address, int(count), int(number))


def _train(
    loaded: _Loaded,
    rows: Rows,
    held_out_rows: Rows | None,
    out: Path,
    mesh: Mesh,
    events: RunEvents,
) -> RunResult:
    config, model = loaded.config, loaded.model
    wide = model.wide
    assert wide is not None  # both loaders see to it
    evaluated, _, _ = take_apart(model, *loaded.trained, keep=loaded.keep)
    if loaded.lora is not None:
        lora.with_dropout(model, jax.random.key(0))
    parts, trainable, frozen = take_apart(model, *loaded.trained, keep=loaded.keep)
    if loaded.lora is not None:
        lora.with_dropout(model, None)
    teacher = _teacher(model) if config.distill != "off" else None
    frozen = place(frozen, mesh)
    trainable = jax.tree.map(lambda x: x.copy(), place(trainable, mesh))
    state = TrainState(trainable, init_optimizer(config, trainable, mesh), 0)

    checkpoints = Checkpoints(
        out / "checkpoints", _settings(config, rows), keep=config.keep_checkpoints
    )
    if checkpoints.latest is not None:
        state = checkpoints.restore(state)
        events.message(f"resuming at update {state.update} of {config.updates}")
    elif (out / metrics.FILE).exists():
        events.message(f"{checkpoints.folder} holds no complete checkpoint: starting at update 0")
    step = make_step(parts, model.config, config, state.trainable, state.opt_state, teacher=teacher)

    evaluation = make_evaluation(evaluated, model.config, wide, config, mesh)
    if held_out_rows is not None and len(held_out_rows) < config.micro_batch:
        raise ValueError(
            f"the evaluation data makes {len(held_out_rows)} rows, fewer than a micro-batch of "
            f"{config.micro_batch}: give more of it"
        )
    log = metrics.MetricsLog(out, resume_at=state.update) if jax.process_index() == 0 else None
    clock = _Clock(config, model, frozen, state.update, loaded.lora)
    events.message(plan(config, model, trainable, frozen, mesh))
    last: UpdateRecord | None = None
    result: HeldOut | None = None

    def report(step_metrics: StepMetrics) -> None:
        nonlocal last
        last = to_record(
            step_metrics,
            model.config,
            wide,
            element_bytes=clock.element_bytes,
            seconds=clock.seconds(),
        )
        _check(last, config, checkpoints.latest)
        events.record(last, config)
        done = last.update + 1
        if log is not None and (done % config.log_every == 0 or done == config.updates):
            values = metrics.record_values(last) | clock.speed(last.update)
            log.write("train", last.update, values)
            events.logged(last.update, values)

    def evaluate(state: TrainState, kind: str) -> None:
        nonlocal result
        assert held_out_rows is not None
        result = evaluation(state.trainable, frozen, held_out_rows, config.evaluation_rows)
        events.held_out(state.update, result)
        if log is not None:
            log.write(kind, state.update - 1, dataclasses.asdict(result))

    def after_update(state: TrainState) -> None:
        finished = state.update == config.updates
        if held_out_rows is not None and (state.update % config.evaluate_every == 0 or finished):
            evaluate(state, "held_out")
        if state.update % config.checkpoint_every == 0 or finished:
            # Never store a state that is already broken: a sum over it costs next to nothing.
            if not all(bool(np.isfinite(float(x.sum()))) for x in state.trainable.values()):
                raise LossNotFiniteError(_broken(state.update - 1, config, checkpoints.latest))
            checkpoints.save(state)
            if 2 * config.checkpoint_every > config.save_every:  # nothing may be lost beside it
                checkpoints.wait()

    batches = ShuffledBatches(
        rows,
        config.sequences_per_update,
        config.seed,
        local=local_rows(mesh, config.sequences_per_update),
    )
    try:
        state = run_updates(
            step,
            state,
            frozen,
            batches,
            mesh,
            config,
            report=report,
            before_first=events.starting,
            after_update=after_update,
        )
        shift = None
        if config.threshold_rows and not config.freeze_routers:
            count = -(-config.threshold_rows // config.micro_batch) * config.micro_batch
            sample = SpreadRows(rows, count)
            events.message(f"setting the masks' cut on {count} training rows ...")
            skips = make_skips(evaluated, model.config, wide, config, mesh, sample)
            moved, shift = meet_target(state.trainable, config, lambda x: skips(x, frozen))
            state = dataclasses.replace(state, trainable=moved)
            events.message(shift.line())
            if log is not None:
                log.write("threshold", state.update - 1, dataclasses.asdict(shift))
            if held_out_rows is not None:
                evaluate(state, "final")
    finally:
        checkpoints.close()
        if log is not None:
            log.close()
    _save(loaded, state, out, last, shift)
    return RunResult(out / "model", last, result)


def _teacher(model: WideForCausalLM) -> ModelParts:
    """The structure of the model without LoRA, for the distillation's dense forward pass."""
    graphdef, state = nnx.split(model)
    dense = nnx.merge(graphdef, state)
    lora.detach(dense)
    return take_apart(dense, RouterParam)[0]


def _check_folder(out: Path, config: CalibrateConfig) -> bool:
    """Whether the run has begun in its folder; a folder neither this run's nor new is refused.

    Raises:
        CheckpointMismatchError: it is another run's.
        FileExistsError: it holds something else.
    """
    if (out / CONFIG).exists():
        stored = to_dict(load(type(config), out / CONFIG))
        inherited = INHERITED if isinstance(config, RecoverConfig) else ()
        problems = differences(stored, to_dict(config), without=inherited)
        if problems:
            raise CheckpointMismatchError(
                f"{out} holds another run: "
                + "; ".join(problems)
                + ". Choose another --out, or the settings of its config.yaml"
            )
        return True
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and holds no {CONFIG}: choose another --out")
    return False


def _rows(
    data: tuple[str, ...], field: str, config: CalibrateConfig, tokenizer: Any, events: RunEvents
) -> Rows:
    recipe = Recipe(data, config.split, field, tokenizer.eos_token_id)
    root = config.cache_dir or cache_dir() / "tokens"
    cache = token_cache(recipe, tokenizer, root, progress=events.tokenised)
    return rows_of(cache, config)


def rows_of(cache: TokenCache, config: CalibrateConfig) -> Rows:
    """A cache's rows as the config packs them."""
    if config.packing == "padded":
        return PaddedRows(cache, config.sequence_length)
    separate = config.packing == "documents"
    return PackedRows(cache, config.sequence_length, separate)


def _settings(config: CalibrateConfig, rows: Any) -> dict[str, Any]:
    """What decides a run's numbers: its config, and the content of its data."""
    return to_dict(config) | {"data_content": rows.cache.content, "rows": len(rows)}


def _check(record: UpdateRecord, config: CalibrateConfig, latest: int | None) -> None:
    try:
        check_finite(record)
    except LossNotFiniteError as error:
        where = _broken(record.update, config, latest)
        raise LossNotFiniteError(f"{error}. {where}") from None
    if record.lm_loss > config.loss_limit:
        raise LossNotFiniteError(
            f"update {record.update}: cross entropy {record.lm_loss:.3g} is above "
            f"loss_limit={config.loss_limit}. {_broken(record.update, config, latest)}"
        )


def _broken(update: int, config: CalibrateConfig, latest: int | None) -> str:
    first = update * config.sequences_per_update
    last = first + config.sequences_per_update - 1
    kept = "there is no checkpoint" if latest is None else f"the last good checkpoint is {latest}"
    return f"The run stopped at update {update} (rows {first} to {last} of its order); {kept}"


class _Clock:
    """Speed of this process: tokens per second and MFU, the first update (compiling) left out."""

    def __init__(
        self,
        config: CalibrateConfig,
        model: WideForCausalLM,
        frozen: Params,
        first: int,
        settings: LoRASettings | None,
    ):
        self._config, self._first = config, first
        self._started = time.perf_counter()
        self._second: float | None = None
        weight = next(iter(frozen.values()))
        self.element_bytes = weight.dtype.itemsize
        assert model.wide is not None
        self._flops = step_flops_per_token(
            model.config,
            model.wide,
            config.sequence_length,
            lora_rank=0 if settings is None else settings.rank,
        )
        device = jax.devices()[0]
        peak = peak_flops(device.device_kind, str(weight.dtype))
        count = config.data_parallel * config.fsdp * config.tensor_parallel
        self._peak = None if peak is None else peak * count

    def seconds(self) -> float:
        """Since training started; marks the end of the first update."""
        now = time.perf_counter()
        if self._second is None:
            self._second = now
        return now - self._started

    def speed(self, update: int) -> dict[str, float | None]:
        """Mean speed after the first update, padding included in the tokens."""
        assert self._second is not None
        elapsed, updates = time.perf_counter() - self._second, update - self._first
        if updates < 1 or elapsed <= 0:
            return {"tokens_per_second": None, "mfu": None}
        speed = updates * self._config.tokens_per_update / elapsed
        mfu = None if self._peak is None else speed * self._flops / self._peak
        return {"tokens_per_second": speed, "mfu": mfu}


def plan(
    config: CalibrateConfig, model: WideForCausalLM, trainable: Params, frozen: Params, mesh: Mesh
) -> str:
    """One paragraph before the run: what is trained and the memory a device needs, in GiB."""
    local = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = config.micro_batch // local
    weights = sum(_local_bytes(x) for x in frozen.values())
    trained = 4 * sum(_local_bytes(x) for x in trainable.values())  # value, gradient, two moments
    architecture, size = model.config, next(iter(frozen.values())).dtype.itemsize
    tokens = rows * config.sequence_length
    kept = architecture.num_hidden_layers if config.remat else 0
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    heads = architecture.num_attention_heads
    layer = 8 * hidden + 4 * inner  # elements a token
    if any(".lora." in name for name in trainable):  # the factors' inputs, after dropout
        layer += 5 * hidden + heads * architecture.head_dim + inner
    if config.attention == "mask":  # scores
        layer += heads * config.sequence_length
    whole_layers = 1 if config.remat else architecture.num_hidden_layers
    activations = tokens * size * (kept * hidden + whole_layers * layer)
    chunk = rows * min(config.logits_chunk, config.sequence_length)
    logits = 3 * chunk * architecture.vocab_size * 4 // mesh.shape["tensor"]
    parts = {
        "weights": weights,
        "trained, with gradient and moments": trained,
        "activations (estimate)": activations,
        "logits of a chunk": logits,
    }
    listed = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in parts.items())
    count = sum(x.size for x in trainable.values())
    return (
        f"training {count:,} parameters on {mesh.size} of {jax.device_count()} device(s); "
        f"GiB a device: {listed}; about {sum(parts.values()) / 2**30:.2f} in all"
    )


def _local_bytes(array: jax.Array) -> int:
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape)) * array.dtype.itemsize


def _save(
    loaded: _Loaded, state: TrainState, out: Path, last: UpdateRecord | None, shift: Shift | None
) -> None:
    """Write `out/model`: routers, adapter and the base's path."""
    config, model = loaded.config, loaded.model
    trained = {name: _host(array) for name, array in state.trainable.items()}
    if jax.process_index() != 0:
        return
    routers = {
        name: _host(array) for name, array in tensors_of(_without_lora(model), is_router).items()
    }
    routers |= {name: array for name, array in trained.items() if is_router(name)}
    adapter = None
    if loaded.lora is not None:
        adapter = LoRA(
            rank=loaded.lora.rank,
            alpha=loaded.lora.alpha,
            factors={
                name: (trained[f"{name}.lora.lora_A"], trained[f"{name}.lora.lora_B"])
                for name in lora.factors_of(model)
            },
            dropout=loaded.lora.dropout,
            rank_stabilised=loaded.lora.rank_stabilised,
        )
    assert model.wide is not None
    save_wide_model(
        out / "model",
        base=loaded.folder,
        config=model.config,
        wide=model.wide,
        routers=routers,
        adapter=adapter,
        budget=config.budget,
        targets=_targets(config),
        training={
            "stage": 1 if loaded.lora is None else 2,
            "method": config.method,
            "target": config.target,
            "updates": config.updates,
            "tokens_per_update": config.tokens_per_update,
            "seed": config.seed,
            "data": list(config.data),
            "last_lm_loss": None if last is None else last.lm_loss,
            "moved_biases": None if shift is None else dict(shift.biases),
        },
        include_base=False,
    )


def _targets(config: CalibrateConfig) -> dict[str, float]:
    """What each routed module aims at, as it is written beside the routers."""
    return {module: config.module_targets[module] for module in config.routed}


def _without_lora(model: WideForCausalLM) -> WideForCausalLM:
    graphdef, state = nnx.split(model)
    plain = nnx.merge(graphdef, state)
    lora.detach(plain)
    return plain


def _host(array: jax.Array) -> np.ndarray:
    """The whole array on this host, whichever processes hold its parts."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
