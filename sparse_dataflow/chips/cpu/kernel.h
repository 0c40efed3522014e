// What kernels of a CPU share: numbers, vectors, threads, and the calls of XLA.

#ifndef SPARSE_DATAFLOW_CHIPS_CPU_KERNEL_H_
#define SPARSE_DATAFLOW_CHIPS_CPU_KERNEL_H_

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#ifdef __AVX2__
#include <immintrin.h>
#endif

// The interface in C compiles in a fraction of the seconds of `ffi.h`.
#include "xla/ffi/api/c_api.h"

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;  // Of the widest vector.
#else
constexpr int kLanes = 8;
#endif

template <int lanes>
struct Vectors {
  typedef float Float __attribute__((vector_size(4 * lanes)));
  typedef uint32_t Bits __attribute__((vector_size(4 * lanes)));
  typedef int32_t Integers __attribute__((vector_size(4 * lanes)));
  typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));
  typedef int8_t Bytes __attribute__((vector_size(lanes)));
};

template <typename V>
inline V read(const void* from) {
  V result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// A bfloat16 is the upper half of a float32.
inline float wide(float value) { return value; }
inline float wide(uint16_t value) {
  uint32_t bits = uint32_t{value} << 16;
  return read<float>(&bits);
}

inline void narrow(float value, float* result) { *result = value; }
inline void narrow(float value, uint16_t* result) {
  uint32_t bits = read<uint32_t>(&value);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  // Rounds to the nearest, ties to even.
  *result = is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <int lanes>
inline typename Vectors<lanes>::Float load(const float* values) {
  return read<typename Vectors<lanes>::Float>(values);
}
template <int lanes>
inline typename Vectors<lanes>::Float load(const uint16_t* values) {
  using V = Vectors<lanes>;
#ifdef __AVX512F__
  if constexpr (lanes == 16)
    return (typename V::Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(values)), 16);
#endif
  auto halves = read<typename V::Halves>(values);
  return (typename V::Float)(__builtin_convertvector(halves, typename V::Bits) << 16);
}
template <int lanes>
inline typename Vectors<lanes>::Float load(const int8_t* values) {
  using V = Vectors<lanes>;
#ifdef __AVX512F__
  if constexpr (lanes == 16)
    return (typename V::Float)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(values)));
#endif
#ifdef __AVX2__
  if constexpr (lanes == 8)
    return (typename V::Float)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values))));
#endif
  auto integers = __builtin_convertvector(read<typename V::Bytes>(values), typename V::Integers);
  return __builtin_convertvector(integers, typename V::Float);
}

// What threads share.  Each takes the next chunk until none is left, so that a thread that comes
// late delays nobody.
struct Work {
  explicit Work(int64_t chunks) : chunks(chunks) {}
  const int64_t chunks;
  std::atomic<int64_t> next{0}, done{0};

  template <typename F>
  void run(const F& chunk) {
    for (int64_t c; (c = next.fetch_add(1)) < chunks; done.fetch_add(1)) chunk(c);
  }
};

XLA_FFI_Error* refused(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = sizeof args;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return api->XLA_FFI_Error_Create(&args);
}

// The threads of XLA for the call of a frame.
struct Threads {
  explicit Threads(const XLA_FFI_CallFrame* frame) : api(frame->api), ctx(frame->ctx) {}
  const XLA_FFI_Api* api;
  decltype(XLA_FFI_CallFrame::ctx) ctx;  // Its type has another name in older versions of jax.

  int64_t count() const {
    int64_t count = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = sizeof args;
    args.ctx = ctx;
    args.num_threads = &count;
    return drop(api->XLA_FFI_ThreadPool_NumThreads(&args)) ? std::max<int64_t>(1, count) : 1;
  }

  // Calls `chunk` with each number below `chunks`, and returns when all calls have.  `chunk` is
  // copied, as a thread that comes late may outlive this call.
  template <typename F>
  void run(int64_t chunks, const F& chunk) const {
    auto work = std::make_shared<Work>(chunks);
    if (chunks > 1)
      for (int64_t t = 1; t < std::min(count(), chunks); ++t)
        schedule([=] { work->run(chunk); });
    work->run(chunk);
    while (work->done.load() < chunks) sched_yield();
  }

 private:
  template <typename F>
  void schedule(const F& function) const {
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = sizeof args;
    args.ctx = ctx;
    args.data = new F(function);
    args.task = [](void* data) {
      (*static_cast<F*>(data))();
      delete static_cast<F*>(data);
    };
    if (!drop(api->XLA_FFI_ThreadPool_Schedule(&args))) args.task(args.data);
  }

  // Returns whether there is no error, which is freed.
  bool drop(XLA_FFI_Error* error) const {
    if (!error) return true;
    XLA_FFI_Error_Destroy_Args args{};
    args.struct_size = sizeof args;
    args.error = error;
    api->XLA_FFI_Error_Destroy(&args);
    return false;
  }
};

inline XLA_FFI_Buffer argument(const XLA_FFI_CallFrame* frame, int i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]);
}
inline XLA_FFI_Buffer result(const XLA_FFI_CallFrame* frame, int i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
}

// Answers XLA's question for which version of its interface this is, else calls the kernel.
inline XLA_FFI_Error* called(XLA_FFI_CallFrame* frame,
                             XLA_FFI_Error* (*kernel)(const XLA_FFI_CallFrame*)) {
  auto* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return kernel(frame);
  auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return nullptr;
}

}  // namespace

#endif
