"""Strategy values: frozen, keyword-only dataclasses that say how a model trains and generates. Pure.

A strategy is a plain value: it is validated when written, compared, printed, saved, and chosen by the planner. The
backend is chosen by its type (`Megatron(...)`, `VLLM(...)`), never by a string.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from hybridflow.errors import ConfigError, PlacementError
from hybridflow.lora import LoRA
from hybridflow.settings import (
    Check,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Size,
    is_number,
    is_whole,
    require,
    settings,
)
from hybridflow.topology import RankGrid, data_parallel, divisors

DType = Literal["float32", "bfloat16", "float16"]
Schedule = Literal["constant", "linear", "cosine"]
IMAGE_TOKENS = 16384
"""Of the largest image that processors of the families with images make by default."""
KV = Literal["recompute", "keep", "offload", "auto"]


@settings
class Group:
    """What a group of parameters has of its own."""

    lr: NonNegative | None = None
    weight_decay: NonNegative | None = None


Groups = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]


def _as_groups(owner: str, given: Any) -> Groups:
    """By pattern, in pairs, which can be hashed. Errors: ConfigError."""
    found = []
    try:
        pairs = dict(given)
        options = [dict(own) if isinstance(own, Mapping | tuple) else {"lr": own} for own in pairs.values()]
    except (TypeError, ValueError):
        raise ConfigError(f"{owner}(groups={given!r}): give learning rates by names, {{'embed': 1e-7}}.") from None
    for (pattern, own), known in zip(pairs.items(), options, strict=True):
        good = isinstance(pattern, str) and pattern
        require(bool(good), f"{owner}(groups={{{pattern!r}: ...}}): give a part of the names of parameters.")
        kept = tuple((name, value) for name, value in vars(Group(**known)).items() if value is not None)
        require(bool(kept), f"{owner}(groups={{{pattern!r}: {own!r}}}): give lr, weight_decay, or both.")
        found.append((pattern, kept))
    return tuple(found)


@settings
class Optimizer:
    """Base of Adam and SGD. `clip_grad` is the largest global gradient norm (0 switches clipping off).

    The learning rate rises linearly over `warmup_steps` optimizer steps and then follows `schedule` down to `min_lr`
    over `total_steps` (needed unless the schedule is constant). `lr` is the highest of the schedule, which never rises
    to `min_lr`.

    `groups` are parameters with settings of their own, {pattern: lr} or {pattern: {"lr": ..., "weight_decay": ...}}: of
    those whose Hugging Face name contains the pattern, in which * is any text ("embed", "layers.0.", "layers.*.mlp").
    The schedule scales the lr of each alike. `weight_decay` holds for matrices, that of a group for norms and biases
    that it names too. A pattern that fits no parameter, and two that fit one, are refused.

    A step is skipped when its gradients, or what they were computed from, are not finite. After `max_skipped` such
    steps in a row the update raises a DivergenceError (None: never).
    """

    lr: NonNegative
    weight_decay: NonNegative = 0.0
    clip_grad: NonNegative = 1.0
    schedule: Schedule = "constant"
    warmup_steps: Count = 0
    total_steps: Size | None = None
    min_lr: NonNegative = 0.0
    groups: Mapping[str, Any] | Groups = ()
    max_skipped: Size | None = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _as_groups(type(self).__name__, self.groups))
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"{type(self).__name__}(schedule={self.schedule!r}) needs total_steps=.")
        if self.schedule != "constant" and self.warmup_steps > (self.total_steps or 0):
            raise ConfigError(
                f"{type(self).__name__}(schedule={self.schedule!r}, warmup_steps={self.warmup_steps}, "
                f"total_steps={self.total_steps}): the warm-up would not end. Use fewer warmup_steps."
            )

    def lr_at(self, step: int, lr: float | None = None) -> float:
        """Learning rate of optimizer step `step` (0-based); `lr` is that of a group."""
        lr = self.lr if lr is None else lr
        if step < self.warmup_steps:
            return lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return lr
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        shape = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        least = min(self.min_lr, lr)
        return least + (lr - least) * shape


def _are_betas(value: Any) -> bool:
    betas = value if isinstance(value, list | tuple) else ()
    return len(betas) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in betas)


@settings
class Adam(Optimizer):
    """AdamW (decoupled weight decay)."""

    betas: Annotated[tuple[float, float], Check("two numbers in [0, 1)", _are_betas)] = (0.9, 0.95)
    eps: NonNegative = 1e-8


@settings
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    momentum: NonNegative = 0.0


@runtime_checkable
class TrainStrategy(Protocol):
    """A value that says how a model is sharded for training; its type chooses the backend."""

    def grid(self, devices: int) -> RankGrid:
        """Rank grid over `devices` devices. Errors: PlacementError when the sizes do not fit."""
        ...


def is_strategy(value: object) -> bool:
    """Whether `value` is a TrainStrategy instance, not a class or another object with a grid."""
    return isinstance(value, TrainStrategy) and not isinstance(value, type) and callable(value.grid)


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value)


Patterns = Annotated[tuple[str, ...], Check('parts of the names of parameters, ("visual",)', _are_patterns)]


def _check_lora(strategy: Megatron | FSDP) -> None:
    name, lora = type(strategy).__name__, strategy.lora
    require(lora is None or isinstance(lora, LoRA), f"{name}(lora={lora!r}): give hf.LoRA(...) or None.")


@settings
class Megatron:
    """Megatron-core 3D parallelism: pipeline, tensor and data parallel sizes (`dp` follows from the pool).

    `dtype` is the dtype of parameters and activations: None means bfloat16 on CUDA and float32 on CPU; with a 16-bit
    dtype, main parameters and gradients are float32. `micro_tokens` is the token budget of one micro-batch; a single
    longer row still forms a micro-batch of its own. `packed` micro-batches are rows laid end to end without padding,
    others are padded to their longest row. `stage_layers` are the decoder layers of each pipeline stage, in order
    (default: even). `ep` ranks of a stage share a mixture of experts, `etp` the columns of each (default: tp if ep=1).

    With `lora` only adapters (and a value head) are trained and stored in float32; the frozen model is in `dtype`.
    """

    tp: Size = 1
    pp: Size = 1
    dp: Size | None = None
    cp: Size = 1
    ep: Size = 1
    etp: Size | None = None
    sequence_parallel: bool = False
    dtype: DType | None = None
    micro_tokens: Size = 16384
    packed: bool = True
    recompute: bool = False
    stage_layers: tuple[int, ...] | None = None
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        given = self.stage_layers
        good = given is None or (len(given) == self.pp and all(type(n) is int and n >= 1 for n in given))
        require(
            good,
            f"Megatron(stage_layers={given}): give one whole number of at least 1 for each of the pp={self.pp} stages.",
        )
        _check_lora(self)

    def grid(self, devices: int) -> RankGrid:
        dp = data_parallel(self, {"tp": self.tp, "pp": self.pp, "cp": self.cp}, self.dp, devices)
        return RankGrid(p=self.pp, t=self.tp, d=dp * self.cp, ep=self.ep, etp=self.etp)


@settings
class FSDP:
    """Torch's fully sharded data parallelism (FSDP2) of transformers' own model (Zhao et al. 2023).

    Parameters, gradients and optimizer state are sharded over the `dp` data parallel ranks (default: all of the pool);
    a decoder layer is gathered while it computes. `replicate` > 1 is HSDP: that number of copies, each sharded over
    dp / replicate ranks. `tp` first shards every layer by tensor parallelism (rank = d * tp + t). `ep` neighbouring
    ranks share a mixture of experts: tokens travel to the rank that has theirs, whose parameters only ranks with the
    same experts gather.

    `dtype` is the compute dtype: None means bfloat16 on CUDA and float32 on CPU. Trained parameters are always stored
    in float32. `micro_tokens` and `packed` are as for `Megatron`. Gradients of the micro-batches of a mini-batch are
    added up on each rank and reduced once, which needs memory for whole gradients; `reduce_often=True` reduces those of
    every micro-batch instead. `offload=True` keeps parameters, gradients and optimizer state in host memory.

    With `lora` only adapters (and a value head) are trained and stored in float32; the frozen model is in `dtype`.
    `freeze` are patterns as in an optimizer's `groups`: parameters whose Hugging Face name contains one are not
    trained, and have neither gradients nor optimizer state. `freeze=("visual",)` leaves the image encoder as it is.
    """

    _instead: ClassVar[Mapping[str, str]] = {
        "pp": "Its ranks share every layer (dp, tp); hf.Megatron(pp=...) has pipeline stages.",
        "sequence_parallel": "hf.Megatron(sequence_parallel=True) has it.",
        "stage": "FSDP() is stage 3; hf.ZeRO(stage=...) has the others.",
    }
    dp: Size | None = None
    replicate: Size = 1
    tp: Size = 1
    cp: Size = 1
    ep: Size = 1
    dtype: DType | None = None
    micro_tokens: Size = 16384
    packed: bool = True
    recompute: bool = False
    reduce_often: bool = False
    offload: bool = False
    lora: LoRA | None = None
    freeze: Patterns = ()

    def __post_init__(self) -> None:
        if self.dp is not None:
            self._check_replicate(self.dp)
        _check_lora(self)
        require(
            self.lora is None or not self.freeze,
            f"FSDP(freeze={self.freeze}, lora=...): with adapters all weights are frozen already. Leave freeze= out.",
        )
        require(
            self.lora is None or self.tp == 1,
            f"FSDP(tp={self.tp}, lora=...): adapters are not cut by tensor parallelism. Use tp=1: a frozen model needs "
            f"neither gradients nor optimizer state, and more dp ranks cut it as well. Or use hf.Megatron(tp=...).",
        )
        require(
            self.ep == 1 or self.tp == 1,
            f"FSDP(tp={self.tp}, ep={self.ep}): tensor parallelism does not cut mixtures of experts here. Use tp=1, or "
            f"hf.Megatron(tp={self.tp}, ep={self.ep}).",
        )

    def grid(self, devices: int) -> RankGrid:
        dp = data_parallel(self, {"tp": self.tp, "cp": self.cp}, self.dp, devices, self.replicate)
        self._check_replicate(dp * self.cp)
        if (shard := dp * self.cp // self.replicate) % self.ep:
            raise PlacementError(
                f"FSDP(ep={self.ep}): experts are shared by ranks of one copy of the model, of which dp={dp}, "
                f"cp={self.cp} and replicate={self.replicate} make {shard}. Use ep in {divisors(shard)}."
            )
        return RankGrid(t=self.tp, d=dp * self.cp, ep=self.ep)

    def _check_replicate(self, dp: int) -> None:
        if dp % self.replicate:
            raise PlacementError(
                f"FSDP(replicate={self.replicate}) makes {self.replicate} copies, which dp={dp} data parallel ranks "
                f"cannot be divided into. Use replicate in {[n for n in range(1, dp + 1) if dp % n == 0]}."
            )


def _is_stage(value: Any) -> bool:
    return is_whole(value) and 1 <= value <= 3


@settings
class ZeRO:
    """Data parallelism without redundancy (Rajbhandari et al. 2020) of transformers' own model.

    Over `dp` ranks (default: all of the pool) stage 1 shards the optimizer state, stage 2 also gradients, stage 3 also
    parameters (the same as `FSDP(reduce_often=True)`). Other settings are those of `FSDP`.

    In stages 1 and 2 parameters have the compute dtype; with a 16-bit dtype there are float32 main parameters as well.
    """

    _instead: ClassVar[Mapping[str, str]] = {
        "tp": "Its ranks share every tensor (dp); hf.FSDP(tp=...) cuts layers too, as hf.Megatron(tp=...) does.",
        "pp": "Its ranks share every tensor (dp); hf.Megatron(pp=...) has pipeline stages.",
        "replicate": "hf.FSDP(replicate=...) makes copies, each cut over some ranks.",
        "ep": "hf.FSDP(ep=...) and hf.Megatron(ep=...) share experts.",
        "reduce_often": "Stages 2 and 3 always do; hf.FSDP(reduce_often=...) has the choice.",
        "lora": "hf.FSDP(lora=...) and hf.Megatron(lora=...) train adapters.",
    }
    stage: Annotated[int, Check("1 (optimizer state), 2 (and gradients) or 3 (and parameters)", _is_stage)]
    dp: Size | None = None
    cp: Size = 1
    dtype: DType | None = None
    micro_tokens: Size = 16384
    packed: bool = True
    recompute: bool = False
    offload: bool = False
    freeze: Patterns = ()

    def grid(self, devices: int) -> RankGrid:
        return RankGrid(d=data_parallel(self, {"cp": self.cp}, self.dp, devices, stage=self.stage) * self.cp)


Penalty = Annotated[float, Check("a number from -2 to 2", lambda value: is_number(value) and -2 <= value <= 2)]


def _as_token(given: Any) -> int:
    digits = isinstance(given, str) and given.isascii() and given.isdigit()
    return int(given) if digits or is_whole(given) else -1


def _as_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs, which can be hashed, of a mapping; clients and JSON have texts for its numbers."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else given
        found = tuple(sorted((_as_token(token), float(bias)) for token, bias in pairs))
    except (TypeError, ValueError):
        found = ((-1, math.nan),)
    good = all(token >= 0 and is_number(bias) for token, bias in found) and len(dict(found)) == len(found)
    require(good, f"Sampling(logit_bias={given!r}): give numbers by ids of tokens, each once, {{1734: -100.0}}.")
    return found


@settings
class Sampling:
    """How responses are sampled. `top_k=0` and `top_p=1` do not truncate; `greedy=True` ignores the temperature.

    `n` responses are sampled per prompt, of at most `max_tokens` tokens (None: 256, or fewer where the context has no
    room for them). Log-probabilities returned with the responses are those of the distribution after temperature and
    before top-k/top-p (truncation renormalises: with it, the ratio to a training policy's log-probabilities is that of
    the untruncated policies).

    A response ends with one of the model's end tokens (`ignore_eos=True`: never, it has `max_tokens` tokens), of
    `stop_token_ids`, or with a string of `stop`, which may be or contain a special token. `skip_special_tokens=False`
    leaves special tokens in the text `response`; by default only marks of thoughts stay.

    `min_p` keeps tokens of at least that share of the most probable one's probability. The others edit the logits of a
    draw, greedy ones too: `bad_words` (texts) are never completed, `logit_bias` {token: number} is added,
    `repetition_penalty` divides positive and multiplies negative logits of tokens in prompt or response,
    `frequency_penalty` subtracts its product with a token's count in the response, `presence_penalty` itself once. All
    are vLLM's; a trajectory's turn has a response of its own. Like truncation none of them changes the
    log-probabilities that are returned: those of the policy at its temperature.
    """

    max_tokens: Size | None = None
    temperature: NonNegative = 1.0
    top_p: PositiveFraction = 1.0
    top_k: Count = 0
    n: Size = 1
    greedy: bool = False
    seed: Count | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_p: Fraction = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Positive = 1.0
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        require(
            self.greedy or self.temperature > 0, "Sampling(temperature=0) has no log-probabilities: use greedy=True."
        )
        require(
            all(is_whole(one) and one >= 0 for one in self.stop_token_ids),
            f"Sampling(stop_token_ids={self.stop_token_ids!r}): give ids of tokens; texts go into stop=.",
        )
        require(
            all(isinstance(one, str) and one for one in self.stop),
            f"Sampling(stop={self.stop!r}): give strings that are not empty; ids of tokens go into stop_token_ids=.",
        )
        require(
            all(isinstance(one, str) and one.strip() for one in self.bad_words),
            f"Sampling(bad_words={self.bad_words!r}): give words; ids of tokens go into logit_bias={{id: -100.0}}.",
        )
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))

    @property
    def penalties(self) -> bool:
        """Whether tokens that were drawn change later draws."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def edits(self) -> bool:
        """Whether draws follow edited logits, or `min_p`."""
        return bool(self.penalties or self.min_p or self.bad_words or self.logit_bias)

    @property
    def policy_temperature(self) -> float:
        """That of the policy whose log-probabilities are returned."""
        return 1.0 if self.greedy else self.temperature

    @property
    def longest(self) -> int:
        """Upper bound of the sampling on a response's tokens."""
        return self.max_tokens or 256


@settings
class Mismatch:
    """How far generation's log-probabilities may be from training's: mean |d| over the batch's tokens, in nats.

    Both are of one policy if the weights are, so `compute_log_prob` compares `log_probs` of the rows with its result,
    in the first iteration, the first with trained weights, and the first after `hf.load` and after `hf.sync_weights`.
    In loops without it `update_actor` computes those of its first mini-batch, before any step. Above `warn`, or if the
    mean of one row is above `refuse`, there is a warning with the rows; above `refuse` a MismatchError. None: never.

    Compared are rows that the actor's present weights have sampled, as the driver's calls say, and not stale rows, rows
    of a stream with `max_staleness` above 0 after the first sync, edited rows, and rows from elsewhere. `log_probs` are
    those at the row's temperature before top_k and top_p, so these make no difference; 16-bit dtypes make one of
    rounding, usually below 0.02. Tokens that are masked, or not finite on one side, do not count.
    """

    warn: NonNegative | None = 0.02
    refuse: NonNegative | None = 0.2


@settings
class Until:
    """When a call of a session of generation ends: `rows` finished rows can be taken, or `groups` (prompts without
    unfinished rows in the engine), `steps` decoding steps or `seconds` have passed, or no row is unfinished."""

    rows: Size | None = None
    groups: Size | None = None
    steps: Size | None = None
    seconds: Positive | None = None


@settings
class VLLM:
    """vLLM generation inside the training processes with sizes t_g=`tp`, p_g=`pp` (paper, section 5). With
    `expert_parallel` (vLLM's `enable_expert_parallel`) each of the `tp` ranks has whole experts, not a part of each.

    `sampling` is the default of `generate_sequences`, whose arguments override it call by call. `max_length` bounds
    prompt plus response (None: the model's context): a response ends there, unfinished, even before `max_tokens`.
    `memory_fraction` (CUDA) is the share of device memory for weights and KV cache, `kv_cache_gb` (CPU) the size of the
    KV cache in GiB. `image_tokens` bounds an image. A step encodes images of 8,192 tokens at most, of `image_tokens` if
    that is less, or one larger image: a small bound leaves more memory to the KV cache. `return_routed_experts` adds
    the column of that name, without return_: the experts of each token.

    Unfinished rows continue when new weights arrive, or when other models have had the devices (an actor that trains
    on its own, a rollout with offload=True). With `kv="recompute"` their KV cache is then computed again. Otherwise it
    stays, which is faster, and later tokens attend to keys and values of older weights; while others have the devices
    it waits in device memory (`kv="keep"`), in host memory (`kv="offload"`), or with `kv="auto"` where the planner's
    constants say it is cheapest for the length of each row, which may be to compute it again.

    On CUDA vLLM captures graphs, which hold addresses: its weights come and go as a whole and share no memory with
    training. `eager=True` (CPU: always) captures none: slower, but transitions go layer by layer and share storages.
    """

    _instead: ClassVar[Mapping[str, str]] = {
        field.name: f"Write VLLM(sampling=hf.Sampling({field.name}=...))." for field in fields(Sampling)
    }
    tp: Size = 1
    pp: Size = 1
    expert_parallel: bool = False
    return_routed_experts: bool = False
    dtype: DType | None = None
    max_length: Size | None = None
    max_sequences: Size = 256
    memory_fraction: Annotated[float, Check("in (0, 1)", lambda value: is_number(value) and 0 < value < 1)] = 0.5
    kv_cache_gb: NonNegative = 0.25
    image_tokens: Size = IMAGE_TOKENS
    eager: bool = False
    kv: KV = "recompute"
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        if isinstance(given := cast("object", self.sampling), Mapping):  # a section of a YAML file
            object.__setattr__(self, "sampling", Sampling(**given))
        require(
            isinstance(self.sampling, Sampling), f"VLLM(sampling={self.sampling!r}): give hf.Sampling(max_tokens=...)."
        )
