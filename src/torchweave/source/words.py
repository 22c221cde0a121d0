"""IDEA: which of torch's names launch work, which wait for it and which do neither, as tables."""

from __future__ import annotations

import re

CLOCKS = frozenset(f"time.{name}{unit}" for name in ("time", "perf_counter", "monotonic") for unit in ("", "_ns")) | {
    "timeit.default_timer"
}

FACTORIES = frozenset(
    "randn rand zeros ones full arange linspace logspace eye randint randperm tensor normal tril_indices "
    "triu_indices hann_window complex".split()
)
# these allocate, and launch nothing that another stream could come too early for
ALLOCATIONS = frozenset("empty empty_strided empty_like".split())
LIKE = frozenset("zeros_like ones_like rand_like randn_like randint_like full_like".split())
WRAPS_HOST = frozenset("from_numpy as_tensor asarray frombuffer".split())

# names directly under torch that are no operation on tensors
NO_OPERATIONS = frozenset(
    "no_grad enable_grad inference_mode set_grad_enabled is_grad_enabled autocast compile load save manual_seed seed "
    "initial_seed get_rng_state set_rng_state device dtype Size Generator finfo iinfo numel typename result_type "
    "promote_types broadcast_shapes broadcast_tensors can_cast is_tensor is_storage is_complex is_floating_point "
    "is_nonzero is_inference is_conj "
    "get_default_dtype set_default_dtype set_default_device get_default_device set_default_tensor_type "
    "set_printoptions set_num_threads get_num_threads use_deterministic_algorithms "
    "are_deterministic_algorithms_enabled set_float32_matmul_precision get_float32_matmul_precision "
    "is_autocast_enabled get_autocast_dtype get_autocast_gpu_dtype is_autocast_cache_enabled "
    "set_deterministic_debug_mode set_warn_always set_flush_denormal vmap cond typename from_dlpack "
    "get_device_module is_deterministic_algorithms_warn_only_enabled import_ir_module sym_int sym_max sym_min "
    "sym_not sym_ite sym_float unravel_index get_device is_distributed is_anomaly_enabled".split()
)
NAMESPACES_OF_OPERATIONS = (
    "torch.nn.functional.",
    "torch.linalg.",
    "torch.fft.",
    "torch.special.",
    "torch.nn.utils.",
)
SYNCHRONIZING_FUNCTIONS = frozenset("nonzero masked_select unique unique_consecutive argwhere equal allclose".split())

METADATA = frozenset(
    "size dim numel nelement stride element_size is_contiguous data_ptr storage untyped_storage storage_offset "
    "get_device requires_grad_ retain_grad register_hook is_pinned is_floating_point is_complex ndimension "
    "register_post_accumulate_grad_hook share_memory_ is_shared has_names names __len__ is_set_to resize_ set_ "
    "ndim nbytes type_as_tuple".split()
)
VIEWS = frozenset(
    "view reshape transpose permute t unsqueeze squeeze expand expand_as narrow detach detach_ flatten unflatten "
    "chunk split tensor_split unbind select view_as movedim swapaxes unfold T mT real imag data squeeze_ unsqueeze_ "
    "contiguous view_dtype diagonal as_strided alias set_ requires_grad_ retain_grad tensor".split()
)
HOST_METHODS = frozenset("item tolist cpu numpy nonzero masked_select unique unique_consecutive argwhere equal".split())

TENSOR_ATTRIBUTES = frozenset("T mT data real imag H".split())
# methods that nothing but a tensor has, so that a value on which one is called is one
OPERATIONS = frozenset(
    "matmul mm bmm addmm addmm_ baddbmm relu relu_ softmax log_softmax sigmoid tanh exp_ exp sqrt rsqrt square cumsum "
    "mul mul_ add_ sub_ div_ div copy_ zero_ fill_ normal_ uniform_ clamp clamp_ clone half bfloat16 "
    "masked_fill masked_fill_ index_select index_add_ index_copy_ scatter_ scatter_add_ gather norm abs mean "
    "argmax argmin topk sort cumprod neg neg_ pow_ addcmul_ addcdiv_ lerp_ logsumexp erf einsum".split()
)

COLLECTIVES = frozenset(
    "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single broadcast reduce "
    "reduce_scatter reduce_scatter_tensor gather scatter _all_gather_base _reduce_scatter_base "
    "all_reduce_coalesced all_gather_coalesced isend irecv send recv barrier".split()
)

# last names of calls that neither launch work nor wait for it
HARMLESS = frozenset(
    "range len zip enumerate min max sorted reversed list dict set tuple isinstance issubclass getattr hasattr setattr "
    "str repr format int float bool abs id type open round super vars next iter callable divmod hash "
    "info debug warning warn error critical exception log write append extend add discard join get pop setdefault keys "
    "values items split strip startswith endswith lower upper replace copy deepcopy insert remove clear index count "
    "zero_grad parse_args add_argument Counter defaultdict OrderedDict partial "
    "Path exists mkdir set_description set_postfix no_grad inference_mode enable_grad autocast "
    "nullcontext record_function named_parameters parameters modules named_modules state_dict buffers "
    "named_buffers children named_children is_initialized get_rank get_world_size is_available device_count "
    "set_epoch randint random choice shuffle uniform sleep sum any all map filter "
    "elapsed".split()
)
# roots of dotted names that touch no tensor
HARMLESS_ROOTS = frozenset(
    "time math random logging os sys json re itertools functools collections warnings argparse pathlib typing "
    "datetime string copy contextlib gc inspect enum dataclasses statistics operator types uuid hashlib shutil".split()
)

# how people call what is called like a module
MODULE = re.compile(
    r"(?!(get|load|make|build|create|init|prepare|save|wrap|unwrap|set|update|compile|convert|register|replace|parse|read|"
    r"write|add|apply|find|is|has|check|print|log|freeze|setup|shard|export|import|patch|clone|copy|run|test|validate|"
    r"evaluate|eval|train|assert|fetch|resolve|select|new|gather|merge|quantize|offload|move|log|reset|count|num|"
    r"verify|switch|use|can|should|normalize|format|in|on|to|from|fuse|unload|clear|free|del)_)"
    r"_*(\w+_)?(model|module|net|network|layer|block|encoder|decoder|linear|conv|mlp|ffn|attn|attention|backbone|"
    r"criterion|loss_fn|loss_func|chunk|expert|stage|embed|embedding|proj|fc|generator|discriminator|unet|vae|"
    r"transformer)\d*$"
)
