// A link that lasts a chosen time, and holds a chosen number of SMs while it moves bytes in device memory.

__device__ __forceinline__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ __forceinline__ void wait_until(unsigned long long due) {
  while (now() < due) __nanosleep(200);
}

// Copies what it can by the deadline, from a source and into a buffer that are both used again from their beginnings.
extern "C" __global__ void torchweave_link_hold(const uint4* source, uint4* scratch, int source_vectors,
                                                int scratch_vectors, int vectors, int duration_ns) {
  const unsigned long long begin = now();
  const unsigned long long end = begin + (unsigned long long)duration_ns;
  const double pace = vectors > 0 ? (double)duration_ns / (double)vectors : 0.0;
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  // a misaligned source loses less than one vector
  const uint4* aligned = (const uint4*)(((unsigned long long)source + 15ULL) & ~15ULL);
  if (source_vectors > 0) {
    for (long long i = first; i < vectors; i += 4 * step) {
      wait_until(begin + (unsigned long long)(pace * (double)i));
      if (now() >= end) break;
      uint4 moved[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const long long at = i + k * step;
        if (at < vectors) moved[k] = aligned[(unsigned int)at % (unsigned int)source_vectors];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const long long at = i + k * step;
        if (at < vectors) scratch[(unsigned int)at % (unsigned int)scratch_vectors] = moved[k];
      }
    }
  }
  wait_until(end);
}

#if __CUDA_ARCH__ >= 900

// One thread drives the bulk copies: six stages of shared memory, three loads ahead of the stores.
// Source: PTX ISA, "cp.async.bulk" and "mbarrier".
constexpr int kStages = 6, kAhead = 3, kChunk = 32768, kHeader = 1024;

__device__ void carry(const char* source, char* target, long long bytes, unsigned long long begin, int duration_ns) {
  extern __shared__ __align__(1024) char shared[];
  if (threadIdx.x != 0) return;
  const unsigned int barriers = (unsigned int)__cvta_generic_to_shared(shared);
  const unsigned int buffers = barriers + kHeader;
  for (int s = 0; s < kStages; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * s));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const long long chunks = (bytes + kChunk - 1) / kChunk;
  const long long mine = chunks > blockIdx.x ? (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const double pace = (double)duration_ns / (double)chunks;
  for (long long k = 0; k < mine + kAhead; ++k) {
    if (k < mine) {
      const long long chunk = blockIdx.x + k * gridDim.x, offset = chunk * kChunk;
      const int size = (int)(bytes - offset < kChunk ? bytes - offset : kChunk);
      wait_until(begin + (unsigned long long)(pace * (double)chunk));
      // the store that used this stage before has read it
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kAhead - 1) : "memory");
      const unsigned int stage = (unsigned int)(k % kStages), barrier = barriers + 8 * stage;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              buffers + stage * kChunk),
          "l"(source + offset), "r"(size), "r"(barrier)
          : "memory");
    }
    const long long j = k - kAhead;
    if (j >= 0 && j < mine) {
      const long long offset = (blockIdx.x + j * gridDim.x) * (long long)kChunk;
      const int size = (int)(bytes - offset < kChunk ? bytes - offset : kChunk);
      const unsigned int stage = (unsigned int)(j % kStages), parity = (unsigned int)((j / kStages) & 1);
      unsigned int done = 0;
      while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barriers + 8 * stage), "r"(parity)
            : "memory");
      }
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target + offset),
                   "r"(buffers + stage * kChunk), "r"(size)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#else

__device__ void carry(const char* source, char* target, long long bytes, unsigned long long begin, int duration_ns) {
  const long long vectors = bytes / 16, step = (long long)gridDim.x * blockDim.x;
  const double pace = (double)duration_ns / (double)vectors;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += step) {
    wait_until(begin + (unsigned long long)(pace * (double)i));
    ((uint4*)target)[i] = ((const uint4*)source)[i];
  }
}

#endif

// The collective's own copy, with one rank: all of it, and no sooner than the deadline. Everything is aligned to 16.
extern "C" __global__ void torchweave_link_carry(const char* source, char* target, long long bytes, int duration_ns) {
  const unsigned long long begin = now();
  carry(source, target, bytes, begin, duration_ns);
  wait_until(begin + (unsigned long long)duration_ns);
}
