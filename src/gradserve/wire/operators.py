"""The operators that a graph may use. What is not named here is refused, whatever torch would do with it.

An operator of a node is ``aten.NAME`` (the overload follows from the arguments) or ``aten.NAME.OVERLOAD`` with NAME in
ATEN, or one of PYTHON: arithmetic on sizes and numbers, and access to the parts of a value. No operator of ATEN reads a
value out of a tensor; those that could draw random numbers or write into a buffer are held to :func:`impurity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

_POINTWISE = """
__and__ __or__ __xor__
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide digamma elu eq erf erfc erfinv exp exp2
expm1 fix floor floor_divide fmax fmin fmod frac ge gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish
hardtanh heaviside hypot isclose isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp less less_equal lgamma
log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative not_equal positive pow prelu rad2deg reciprocal
relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_expit
special_log1p special_xlogy sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy
"""

_REDUCTIONS = """
all amax amin any argmax argmin argsort aminmax cummax cummin cumprod cumsum count_nonzero diff dist
linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min nanmean nansum norm prod softmax sort std
std_mean sum topk trace var var_mean kthvalue
"""

_SHAPES = """
alias arange atleast_1d atleast_2d broadcast_tensors broadcast_to cat chunk clone concat concatenate constant_pad_nd
contiguous detach diag_embed diagonal dim empty_like eye expand expand_as flatten flip fliplr flipud full full_like
gather hstack index index_add index_copy index_fill index_put index_select lift_fresh mT masked_scatter meshgrid
movedim moveaxis narrow new_empty new_full new_ones new_zeros numel numpy_T ones ones_like pad permute repeat
repeat_interleave reshape roll rot90 scalar_tensor scatter scatter_add scatter_reduce select select_scatter slice
slice_scatter split split_with_sizes squeeze stack sum_to_size swapaxes swapdims sym_numel sym_size t take
take_along_dim tensor_split tile to _to_copy transpose tril triu type_as unbind unflatten unfold unsafe_chunk
unsafe_split unsqueeze view view_as reshape_as vstack zeros zeros_like one_hot searchsorted bucketize linspace ravel
_unsafe_view pixel_shuffle channel_shuffle
"""

_NETWORKS = """
adaptive_avg_pool1d adaptive_avg_pool2d addbmm addmm addmv avg_pool1d avg_pool2d baddbmm batch_norm bilinear
binary_cross_entropy binary_cross_entropy_with_logits bmm conv1d conv2d conv3d convolution cosine_embedding_loss
cosine_similarity cross_entropy_loss dot einsum embedding group_norm gru gru_cell hinge_embedding_loss huber_loss
inner instance_norm kl_div l1_loss layer_norm linear lstm lstm_cell margin_ranking_loss matmul max_pool1d max_pool2d
mm mse_loss mv native_layer_norm nll_loss nll_loss_nd outer pairwise_distance poisson_nll_loss rms_norm rnn_relu
rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention smooth_l1_loss soft_margin_loss tensordot
triplet_margin_loss upsample_nearest2d vdot vecdot linalg_vecdot
"""


def _named(prefix: str, names: str) -> frozenset[str]:
    return frozenset(prefix + name for name in names.split())


ATEN: Final = _named("aten.", _POINTWISE + _REDUCTIONS + _SHAPES + _NETWORKS)
"""Names of operators, each standing for all its overloads that return new tensors."""

ARITHMETIC: Final = _named(
    "py.", "abs add and_ eq floordiv ge gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
)
"""Python's operators, on tensors, numbers and sizes."""

NUMBERS: Final = _named(
    "py.", "bool ceil cos exp float floor int log log10 log1p log2 max min not_ prod sin sqrt sum tanh"
)
"""Functions of plain numbers: Python's own and those of its ``math`` module."""

ACCESS: Final = _named("py.", "getitem shape ndim dtype device")
"""Parts of a value: an element of a tuple, a slice of a tensor, a tensor's shape."""

PYTHON: Final = ARITHMETIC | NUMBERS | ACCESS

FACTORIES: Final = _named("aten.", "arange eye full linspace ones scalar_tensor zeros")
"""Operators that make a tensor from numbers alone."""

LISTS: Final = _named(
    "aten.",
    "atleast_1d atleast_2d broadcast_tensors cat concat concatenate einsum hstack meshgrid stack tensordot vstack "
    "where",
)
"""Operators whose first argument need not be a tensor: a list of them, a string, a condition beside them."""


def allowed(op: str) -> bool:
    """Whether a graph may use ``op``: of ``aten.mul.Tensor`` the first two parts must be in ATEN."""
    return op in PYTHON or ".".join(op.split(".")[:2]) in ATEN


_RECURRENT = ("aten.gru", "aten.lstm", "aten.rnn_relu", "aten.rnn_tanh")
_STATISTICS = {"aten.batch_norm": "training", "aten.instance_norm": "use_input_stats"}

Impurity = Literal["random", "writes", "sparse"]


def impurity(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Impurity | None:
    """What a node would do besides returning new dense tensors: draw random numbers, or write into its arguments.

    Arguments that decide it have to be written in the node, not computed.
    """

    def given(position: int, name: str, default: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    name = ".".join(op.split(".")[:2])
    if name in _RECURRENT and not op.endswith(".input"):
        return "random"
    if name in _RECURRENT and given(5, "dropout", None) != 0 and given(6, "train", None) is not False:
        return "random"
    if name == "aten.scaled_dot_product_attention" and given(4, "dropout_p", 0.0) != 0:
        return "random"
    if name in _STATISTICS and given(5, _STATISTICS[name], None) is not False:
        kept = given(3, "running_mean", None), given(4, "running_var", None)
        return None if kept == (None, None) else "writes"
    if name == "aten.embedding" and given(4, "sparse", False) is not False:
        return "sparse"
    return None
