"""IDEA: the names that `torch.cuda` and its streams and events have, over all versions since 1.0, as a table.

A call of a public name that is not here is told as `no_such_call`. A test compares it with the torch that is installed.
"""

from __future__ import annotations

CUDA = frozenset(
    """
    AcceleratorError BFloat16Storage BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor CUDAGraph
    CUDAPluggableAllocator CharStorage CharTensor ComplexDoubleStorage ComplexFloatStorage CudaError
    DeferredCudaCallError Device DoubleStorage DoubleTensor Event ExternalStream FloatStorage FloatTensor GreenContext
    HalfStorage HalfTensor IntStorage IntTensor LongStorage LongTensor MemPool MemPoolContext OutOfMemoryError
    ShortStorage ShortTensor Stream StreamContext amp caching_allocator_alloc caching_allocator_delete
    caching_allocator_disabled caching_allocator_enable can_device_access_peer change_current_allocator check_error
    clock_rate comm cudaStatus cudart current_blas_handle current_device current_solver_handle current_stream
    default_generators default_stream device device_count device_ctx_manager device_memory_used device_of empty_cache
    error find_cuda_windows_lib gds get_allocator_backend get_arch_list get_device_capability get_device_name
    get_device_properties get_gencode_flags get_per_process_memory_fraction get_rng_state get_rng_state_all
    get_stream_from_external get_sync_debug_mode graph graph_pool_handle graphs green_contexts has_half has_magma
    host_memory_stats host_memory_stats_as_nested_dict init initial_seed ipc_collect is_available is_bf16_supported
    is_current_stream_capturing is_initialized is_tf32_supported jiterator list_gpu_processes make_graphed_callables
    manual_seed manual_seed_all max_memory_allocated max_memory_cached max_memory_reserved mem_get_info memory
    memory_allocated memory_cached memory_reserved memory_snapshot memory_stats memory_stats_as_nested_dict
    memory_summary memory_usage nccl nvtx power_draw profiler random reset_accumulated_host_memory_stats
    reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats
    reset_peak_memory_stats seed seed_all set_device set_per_process_memory_fraction set_rng_state set_rng_state_all
    set_stream set_sync_debug_mode snapshot sparse stream streams synchronize temperature tunable use_mem_pool
    utilization classproperty
    """.split()
)

STREAM = frozenset(
    """
    query record_event synchronize wait_event wait_stream cuda_stream stream_id device device_index device_type device
    priority_range priority ptr native_handle is_capturing
    """.split()
)

EVENT = frozenset(
    "elapsed_time from_ipc_handle ipc_handle query record synchronize wait cuda_event event_id device".split()
)

# what people are told to call, or try, and what they want
INSTEAD = {
    "async_copy_to_device": "x = pinned.to('cuda', non_blocking=True)",
    "async_copy_from_device": "pinned.copy_(x, non_blocking=True)",
    "async_copy": "pinned.copy_(x, non_blocking=True)",
    "memcpy_async": "pinned.copy_(x, non_blocking=True)",
    "create_stream": "side = torch.cuda.Stream()",
    "stream_synchronize": "side.synchronize()",
    "stream_wait_event": "side.wait_event(event)",
    "stream_wait_stream": "side.wait_stream(other)",
    "synchronise": "torch.cuda.synchronize()",
    "sync": "torch.cuda.synchronize()",
    "wait_stream": "torch.cuda.current_stream().wait_stream(side)",
    "wait_event": "torch.cuda.current_stream().wait_event(event)",
    "record_event": "event = torch.cuda.current_stream().record_event()",
    "record_stream": "x.record_stream(side)",
    "current_streams": "torch.cuda.current_stream()",
    "get_current_stream": "torch.cuda.current_stream()",
    "pin_memory": "x.pin_memory()",
    "async_stream": "with torch.cuda.stream(side): ...",
    "clear_cache": "torch.cuda.empty_cache()",
}
INSTEAD_STREAM = {
    "wait": "side.wait_stream(other)    # or side.wait_event(event), or side.synchronize() for the host",
    "sync": "side.synchronize()",
    "synchronise": "side.synchronize()",
    "record": "event = side.record_event()",
    "wait_for": "side.wait_stream(other)",
    "join": "torch.cuda.current_stream().wait_stream(side)",
    "is_done": "side.query()",
    "done": "side.query()",
}
INSTEAD_EVENT = {
    "sync": "event.synchronize()",
    "synchronise": "event.synchronize()",
    "wait_stream": "event.wait(side)",
    "wait_event": "event.wait(side)",
    "elapsed": "start.elapsed_time(end)",
    "done": "event.query()",
    "is_done": "event.query()",
    "record_event": "event.record(side)",
}
