// x W for a W that stores groups of one input and some neighbouring outputs, as an XLA custom call.
//
//   x       [tokens, inputs], float32 or bfloat16
//   values  [groups, count, width], float32, bfloat16 or int8; width is 8, 16, 32 or 64
//   inputs  [groups, count], uint16: the input of each stored group; [0, 0] where every group stores
//           all inputs in order
//   scales  [groups * width], float32, of the outputs; [0] for none
//   y       [tokens, groups * width], like x; sums are float32
//
// A single token is bound by the bytes of `values`, which are read once and in order.  Several
// tokens together use each value several times while it is in a register.

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

constexpr int kLanes = 8;  // Of a vector; twelve vectors of sums are in registers together.

typedef float Float __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

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

inline Float load(const float* values) { return read<Float>(values); }
inline Float load(const uint16_t* values) {
  return (Float)(__builtin_convertvector(read<Halves>(values), Bits) << 16);
}
inline Float load(const int8_t* values) {
#ifdef __AVX2__
  auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
  return (Float)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  return __builtin_convertvector(__builtin_convertvector(read<Bytes>(values), Integers), Float);
#endif
}

// One or two vectors of neighbouring outputs.  `place` says of which output a lane is: the two
// vectors of a bfloat16 row have the even and the odd outputs, which takes fewer instructions.
template <int vectors, typename V>
struct Row {
  static void load_to(const V* values, Float* row) {
    for (int v = 0; v < vectors; ++v) row[v] = load(values + v * kLanes);
  }
  static int place(int vector, int lane) { return vector * kLanes + lane; }
};
template <>
struct Row<2, uint16_t> {
  static void load_to(const uint16_t* values, Float* row) {
    auto bits = read<Bits>(values);
    row[0] = (Float)(bits << 16);
    row[1] = (Float)(bits & 0xffff0000u);
  }
  static int place(int vector, int lane) { return 2 * lane + vector; }
};

// 8 or 16 neighbouring outputs of a group.
struct Strip {
  const char* values;      // Of its first row.
  const uint16_t* inputs;  // Of each row; null for all in order.
};

// Adds up the outputs of some strips for some tokens, input by input, into y [strips, tokens,
// outputs].  Strips of a single token take turns: one addition waits for the one before, and a
// processor reads several streams faster than one.
template <int tokens, int vectors, int strips, typename V>
void add_up(const float* x, const Strip* strip, int64_t count, int width, float* y) {
  Float sums[strips][tokens][vectors] = {};
  const V* values[strips];
  for (int s = 0; s < strips; ++s) values[s] = reinterpret_cast<const V*>(strip[s].values);
  auto loop = [&](auto input_of) {
    for (int64_t j = 0; j < count; ++j)
      for (int s = 0; s < strips; ++s) {
        const float* factors = x + input_of(s, j) * tokens;
        Float row[vectors];
        Row<vectors, V>::load_to(values[s] + j * width, row);
        for (int t = 0; t < tokens; ++t)
          for (int v = 0; v < vectors; ++v) sums[s][t][v] += row[v] * factors[t];
      }
  };
  if (strip[0].inputs) loop([&](int s, int64_t j) { return int64_t{strip[s].inputs[j]}; });
  else loop([](int, int64_t j) { return j; });
  for (int s = 0; s < strips; ++s)
    for (int t = 0; t < tokens; ++t)
      for (int v = 0; v < vectors; ++v)
        for (int lane = 0; lane < kLanes; ++lane)
          y[(s * tokens + t) * vectors * kLanes + Row<vectors, V>::place(v, lane)] =
              sums[s][t][v][lane];
}

constexpr int kStrips = 4;  // Of a single token that take turns.

using Kernel = void (*)(const float*, const Strip*, int64_t, int, float*);

template <typename V>
Kernel kernel_of(int tokens, int strips, bool is_narrow) {
  if (tokens == 1 && strips == 1) return is_narrow ? add_up<1, 1, 1, V> : add_up<1, 2, 1, V>;
  if (tokens == 1) return is_narrow ? add_up<1, 1, kStrips, V> : add_up<1, 2, kStrips, V>;
  if (tokens == 4) return is_narrow ? add_up<4, 1, 1, V> : add_up<4, 2, 1, V>;
  return is_narrow ? add_up<6, 1, 1, V> : add_up<6, 2, 1, V>;
}

Kernel kernel_of(XLA_FFI_DataType values, int tokens, int strips, bool is_narrow) {
  if (values == XLA_FFI_DataType_F32) return kernel_of<float>(tokens, strips, is_narrow);
  if (values == XLA_FFI_DataType_BF16) return kernel_of<uint16_t>(tokens, strips, is_narrow);
  if (values == XLA_FFI_DataType_S8) return kernel_of<int8_t>(tokens, strips, is_narrow);
  return nullptr;
}

// What threads share.  Each takes the next chunk of groups until none is left, so that a thread
// that comes late delays nobody.
struct Work {
  explicit Work(int64_t chunks) : chunks(chunks) {}
  const int64_t chunks;
  std::atomic<int64_t> next{0}, done{0};

  template <typename F>
  void run(const F& chunk) {
    for (int64_t c; (c = next.fetch_add(1)) < chunks; done.fetch_add(1)) chunk(c);
  }
};

template <typename T>
void widen(const void* from, int64_t count, float* to, int stride) {
  for (int64_t i = 0; i < count; ++i) to[i * stride] = wide(static_cast<const T*>(from)[i]);
}

template <typename T>
void write(const float* from, const float* scales, int count, void* to) {
  for (int o = 0; o < count; ++o)
    narrow(scales ? from[o] * scales[o] : from[o], static_cast<T*>(to) + o);
}

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

XLA_FFI_Error* row_matmul(const XLA_FFI_CallFrame* frame) {
  if (frame->args.size != 4 || frame->rets.size != 1)
    return refused(frame->api, "row_matmul has four arguments and a result");
  auto buffer = [&](int i) { return *static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]); };
  const XLA_FFI_Buffer x = buffer(0), values = buffer(1), inputs = buffer(2), scales = buffer(3);
  const auto* y = static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[0]);
  const int64_t rows = x.dims[0], features = x.dims[1];
  const int64_t groups = values.dims[0], count = values.dims[1], width = values.dims[2];
  const int64_t outputs = groups * width;
  const int tokens = rows == 1 ? 1 : rows <= 8 ? 4 : 6, span = width % 16 ? 8 : 16;
  const int most_strips = tokens == 1 ? kStrips : 1;
  const Kernel several = kernel_of(values.dtype, tokens, most_strips, span == 8);
  const Kernel single = kernel_of(values.dtype, tokens, 1, span == 8);
  const bool is_float = x.dtype == XLA_FFI_DataType_F32;
  if (!single || !(is_float || x.dtype == XLA_FFI_DataType_BF16) || y->dtype != x.dtype ||
      inputs.dtype != XLA_FFI_DataType_U16 || scales.dtype != XLA_FFI_DataType_F32)
    return refused(frame->api, "row_matmul has no such dtypes");

  // Tokens in blocks, in each of which the tokens of an input lie together.
  const int64_t blocks = (rows + tokens - 1) / tokens;
  std::shared_ptr<float[]> held(new float[blocks * tokens * features]());
  const int64_t end_size = is_float ? sizeof(float) : sizeof(uint16_t);
  for (int64_t row = 0; row < rows; ++row) {
    float* to = held.get() + row / tokens * tokens * features + row % tokens;
    const char* from = static_cast<const char*>(x.data) + row * features * end_size;
    (is_float ? widen<float> : widen<uint16_t>)(from, features, to, tokens);
  }

  const Threads pool(frame);
  const int64_t threads = pool.count();
  const int64_t size = values.dtype == XLA_FFI_DataType_F32    ? 4
                       : values.dtype == XLA_FFI_DataType_BF16 ? 2
                                                               : 1;
  const int64_t bytes = std::max<int64_t>(1, count * span * size);
  // A chunk is worth waking a thread for.
  const int64_t strips = outputs / span, least = std::max<int64_t>(kStrips, (1 << 15) / bytes);
  const int64_t part = std::max(least, (strips + 4 * threads - 1) / (4 * threads));
  auto work = std::make_shared<Work>((strips + part - 1) / part);
  const char* from = static_cast<const char*>(values.data);
  char* to = static_cast<char*>(y->data);
  const auto* index = inputs.dims[0] ? static_cast<const uint16_t*>(inputs.data) : nullptr;
  const auto* factors = scales.dims[0] ? static_cast<const float*>(scales.data) : nullptr;
  auto chunk = [=](int64_t c) {
    float sums[6 * 16];
    Strip strip[kStrips];
    const int64_t end = std::min(strips, (c + 1) * part);
    for (int64_t first = c * part, taken; first < end; first += taken) {
      taken = first + most_strips <= end ? most_strips : 1;
      for (int64_t s = 0; s < taken; ++s) {
        const int64_t output = (first + s) * span, group = output / width;
        strip[s] = {from + (group * count * width + output % width) * size,
                    index ? index + group * count : nullptr};
      }
      for (int64_t block = 0; block < blocks; ++block) {
        (taken > 1 ? several : single)(held.get() + block * tokens * features, strip, count,
                                       static_cast<int>(width), sums);
        for (int64_t s = 0; s < taken; ++s)
          for (int64_t t = 0; t < std::min<int64_t>(tokens, rows - block * tokens); ++t) {
            const int64_t output = (first + s) * span;
            (is_float ? write<float> : write<uint16_t>)(
                sums + (s * tokens + t) * span, factors ? factors + output : nullptr, span,
                to + ((block * tokens + t) * outputs + output) * end_size);
          }
      }
    }
  };
  for (int64_t t = 1; t < std::min(threads, work->chunks); ++t)
    pool.schedule([=] { work->run(chunk); });
  work->run(chunk);
  while (work->done.load() < work->chunks) sched_yield();
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* sparse_dataflow_row_matmul(XLA_FFI_CallFrame* frame) {
  auto* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return row_matmul(frame);
  // XLA asks for which version of its interface this is.
  auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return nullptr;
}
