"""Control policies on the wire: the environment, its spaces, what a rollout collects and how PPO updates.

Nothing here needs torch or gymnasium, so that a gateway can check a request and a client can make one.

>>> validate_rollout(RolloutSpec(env=EnvSpec("CartPole-v1"), num_envs=8, steps=32, seed=0))
"""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from gradserve.wire.errors import Invalid

Scalar = bool | int | float | str | None
SpaceKind = Literal["box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple"]

MAX_ENVS = 4096
MAX_STEPS = 1 << 16
MAX_TRANSITIONS = 1 << 22
"""Bounds of one rollout: environments, steps of each, and their product."""
MAX_SETTINGS, MAX_ITEMS, MAX_TEXT = 64, 4096, 256
"""Bounds of an environment's settings: how many, items of a list, characters of a text."""

_ID = re.compile(r"(?:[\w-]+/)?\w[\w.-]*", re.ASCII)
_DENIED_IDS = re.compile(r"GymV\d+Environment-")
"""Bridges to other libraries: they take an id of their own, which may name a module to import."""
_DENIED_SETTINGS = frozenset(
    {
        # arguments of gymnasium.make and make_vec, not of an environment
        *("id", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "additional_wrappers", "autoreset"),
        *("disable_env_checker", "order_enforce", "apply_api_compatibility", "max_episode_steps"),
        # pictures are not made on a worker; files are not read there
        *("render_mode", "render_fps", "xml_file", "model_path"),
    }
)


class EnvSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Gymnasium environment by its registered id: ``EnvSpec("LunarLander-v3", {"gravity": -8.0})``.

    ``kwargs`` are settings of the environment: JSON scalars and lists of them. ``max_episode_steps`` replaces the
    registered time limit.
    """

    id: str
    kwargs: dict[str, Scalar | list[Scalar]] = {}
    max_episode_steps: int | None = None


class SpaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Gymnasium space without gymnasium.

    box: ``shape``, ``dtype`` and the bounds ``low`` and ``high``, one per element in row-major order or one for all,
    None where there is none. discrete: ``nvec`` of one and ``start``. multi_discrete: ``nvec`` (row-major) and
    ``start``. multi_binary: ``shape``. dict and tuple: ``parts`` in Gymnasium's own order, for a dict with ``keys``.
    """

    kind: SpaceKind
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: tuple[float | None, ...] = (None,)
    high: tuple[float | None, ...] = (None,)
    nvec: tuple[int, ...] = ()
    start: tuple[int, ...] = (0,)
    parts: tuple[SpaceSpec, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Elements of one sample: of an action this is its number of columns in a trajectory."""
        return sum(part.size for part in self.parts) if self.parts else math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        """Whether a policy sees it as it is, uint8 of three axes, and not flattened to float32."""
        return self.kind == "box" and self.dtype == "uint8" and len(self.shape) == 3

    @property
    def observed_shape(self) -> tuple[int, ...]:
        """The shape of one observation as the policy sees it: an image's own, else [features]."""
        return self.shape if self.is_image else (self.features,)

    @property
    def features(self) -> int:
        """Length of one sample flattened as ``gymnasium.spaces.flatten`` does, discrete values one-hot."""
        if self.parts:
            return sum(part.features for part in self.parts)
        return sum(self.nvec) if self.nvec else self.size

    @property
    def num_logits(self) -> int:
        """Width of the policy's output ``logits`` when this is the action space: 0 if nothing in it is discrete."""
        if self.parts:
            return sum(part.num_logits for part in self.parts)
        return 0 if self.kind == "box" else self.features

    @property
    def num_means(self) -> int:
        """Width of the policy's outputs ``mean`` and ``log_std``: the elements of all boxes in the space."""
        if self.parts:
            return sum(part.num_means for part in self.parts)
        return self.size if self.kind == "box" else 0


class RolloutSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``num_envs`` environments for ``steps`` steps each, from where the last rollout left them.

    ``seed`` fixes every episode and every action of the run; give the same one at each rollout. The environments are
    cut into groups of ``envs_per_task``; group g has those from g * envs_per_task on. The trajectories depend on that
    number and never on how many workers there are.

    ``normalise_observations``: with the running mean and variance that the weights carry, clipped to
    ``clip_observation``. ``normalise_rewards``: by the running deviation of the return discounted by ``gamma``, clipped
    to ``clip_reward``. Both as VecNormalize of Stable-Baselines3, with its clip ranges.

    ``anchor_steps``: the state of an environment is its seed and all the actions since, so one that has taken that many
    without an end starts anew at the next rollout. It counts as a truncation: a rollout's last values are bootstrapped.
    Environments that step as one object (vector entry points) share a seed; all of them start anew together.
    """

    env: EnvSpec
    num_envs: int
    steps: int
    seed: int
    envs_per_task: int = 64
    normalise_observations: bool = False
    normalise_rewards: bool = False
    gamma: float = 0.99
    clip_observation: float = 10.0
    clip_reward: float = 10.0
    anchor_steps: int = 2048

    @property
    def groups(self) -> int:
        """How many groups, and so Tasks, the environments are cut into."""
        return -(-self.num_envs // self.envs_per_task)

    def members(self, group: int) -> range:
        """The numbers of the environments in a group."""
        return range(group * self.envs_per_task, min((group + 1) * self.envs_per_task, self.num_envs))


class PPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One update by Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347).

    The defaults are those of Stable-Baselines3's PPO. Annealing is the client's: it sends this update's values.
    "Details" are those of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization".

    clip_range           epsilon of the clipped surrogate, PPO's equation 7 (detail 8)
    clip_range_vf        how far a value may move from the stored one, None: unbounded (detail 9)
    ent_coef, vf_coef    c2 and c1 of PPO's equation 9 (detail 10). The value loss is the mean squared error without a
                         factor of one half, as in Stable-Baselines3, whose coefficients these are.
    max_grad_norm        bound on the global L2 norm of each minibatch's gradient (detail 11); 0: none
    gamma, gae_lambda    of generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438; detail 5)
    epochs               passes over the trajectories
    minibatch_size       transitions per optimizer step (detail 6); what does not divide is cut into nearly equal parts
    normalise_advantage  to mean 0 and deviation 1 within each minibatch (detail 7)
    target_kl            stop before a step at which the estimated KL exceeds 1.5 times this, as Stable-Baselines3 does;
                         None: never
    learning_rate        of Adam (Kingma and Ba 2015, arXiv:1412.6980), this update's value (detail 4)
    beta1, beta2, eps    of Adam; eps is 1e-5 (detail 3)
    """

    clip_range: float = 0.2
    clip_range_vf: float | None = None
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    epochs: int = 10
    minibatch_size: int = 64
    normalise_advantage: bool = True
    target_kl: float | None = None
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-5


class EpisodeStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Episodes that ended, in the order (step, environment), and what was spent.

    ``returns`` are undiscounted sums of the environment's own rewards; ``lengths`` and ``env_steps`` count calls of
    step that moved an environment. ``env_steps`` is what is billed; steps of a replay are not in it.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    env_steps: int


def validate_env(env: EnvSpec) -> None:
    """Raises Invalid for an id that is not a plain registered one, or settings that an environment may not be given."""
    if ":" in env.id:
        _refuse("env.id", f"{env.id!r} names a module to import.", "Send a registered id without a module.")
    if not _ID.fullmatch(env.id) or _DENIED_IDS.match(env.id):
        _refuse("env.id", f"{env.id!r} is not served.", "Send a registered id such as CartPole-v1.")
    if env.max_episode_steps is not None:
        _at_least_one("env.max_episode_steps", env.max_episode_steps)
    if len(env.kwargs) > MAX_SETTINGS:
        _refuse("env.kwargs", f"{len(env.kwargs)} settings.", f"Send at most {MAX_SETTINGS}.")
    for name, value in env.kwargs.items():
        _validate_setting(f"env.kwargs.{name}", name, value)


def _validate_setting(field: str, name: str, value: Scalar | list[Scalar]) -> None:
    if name == "max_episode_steps":
        _refuse(field, "The time limit is no setting.", "Send it as env.max_episode_steps.")
    if name in _DENIED_SETTINGS:
        _refuse(field, f"{name!r} may not be set.", "Leave it out.")
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_ITEMS:
        _refuse(field, f"{len(values)} items.", f"Send at most {MAX_ITEMS}.")
    for item in values:
        if isinstance(item, float) and not math.isfinite(item):
            _refuse(field, f"{item} is not finite.", "Send a finite number.")
        if isinstance(item, str) and (len(item) > MAX_TEXT or "/" in item or "\\" in item):
            _refuse(
                field, "a long text or a path.", f"Send a name of at most {MAX_TEXT} characters; files are not read."
            )


def validate_rollout(spec: RolloutSpec) -> None:
    """Raises Invalid naming the field that is out of bounds."""
    validate_env(spec.env)
    for name in ("num_envs", "steps", "envs_per_task", "anchor_steps"):
        _at_least_one(name, getattr(spec, name))
    _at_most("num_envs", spec.num_envs, MAX_ENVS)
    _at_most("envs_per_task", spec.envs_per_task, MAX_ENVS)
    _at_most("steps", spec.steps, MAX_STEPS)
    _at_most("anchor_steps", spec.anchor_steps, MAX_STEPS)
    if spec.num_envs * spec.steps > MAX_TRANSITIONS:
        _refuse("steps", f"num_envs * steps is {spec.num_envs * spec.steps}.", f"Ask for at most {MAX_TRANSITIONS}.")
    _fraction("gamma", spec.gamma)
    _positive("clip_observation", spec.clip_observation)
    _positive("clip_reward", spec.clip_reward)


def validate_ppo(config: PPOConfig) -> None:
    """Raises Invalid naming the field that is out of bounds."""
    for name in ("epochs", "minibatch_size"):
        _at_least_one(name, getattr(config, name))
    _at_most("epochs", config.epochs, 1000)
    for name in ("clip_range", "learning_rate", "eps"):
        _positive(name, getattr(config, name))
    for name in ("clip_range_vf", "target_kl"):
        if (bound := getattr(config, name)) is not None:
            _positive(name, bound)
    for name in ("ent_coef", "vf_coef", "max_grad_norm"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            _refuse(name, f"{value} is not zero or more.", "Send a finite number of at least 0.")
    for name in ("gamma", "gae_lambda"):
        _fraction(name, getattr(config, name))
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            _refuse(name, f"{getattr(config, name)} is not in [0, 1).", "Send 0.9 and 0.999, for example.")


def _refuse(field: str, detail: str, fix: str) -> None:
    raise Invalid("bad_control", f"{field}: {detail}", field=field, fix=fix)


def _at_least_one(field: str, value: int) -> None:
    if value < 1:
        _refuse(field, f"{value} is less than 1.", "Send at least 1.")


def _at_most(field: str, value: int, bound: int) -> None:
    if value > bound:
        _refuse(field, f"{value} is more than {bound}.", f"Send at most {bound}.")


def _positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        _refuse(field, f"{value} is not a positive number.", "Send a finite number above 0.")


def _fraction(field: str, value: float) -> None:
    if not 0 <= value <= 1:
        _refuse(field, f"{value} is not in [0, 1].", "Send a number from 0 to 1.")
