// x W for a W that stores groups of one input and 8, 16, 32 or 64 outputs, as an XLA custom call.
//
//   x       [tokens, inputs], float32 or bfloat16
//   values  [groups, count, width], like x: the stored groups of neighbouring outputs
//   inputs  [groups, count], uint16 or int32: the input of each stored group
//   y       [tokens, groups * width], like x; sums are float32
//
// A single token is bound by the bytes of `values`, which are read once and in order.  Eight tokens
// together use each value eight times while it is in a register.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;  // Of a vector, which the compiler splits where registers are shorter.
constexpr int kTokens = 8;  // Most tokens whose sums are in registers together.

template <int lanes>
struct Vectors {
  typedef float Float __attribute__((vector_size(4 * lanes)));
  typedef uint32_t Bits __attribute__((vector_size(4 * lanes)));
  typedef uint16_t Half __attribute__((vector_size(2 * lanes)));
};

// A bfloat16 is the upper half of a float32.
inline float wide(float value) { return value; }
inline float wide(uint16_t value) {
  uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void narrow(float value, float* result) { *result = value; }
inline void narrow(float value, uint16_t* result) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  // Rounds to the nearest, ties to even.
  *result = is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <int lanes>
inline typename Vectors<lanes>::Float load(const float* values) {
  typename Vectors<lanes>::Float result;
  std::memcpy(&result, values, sizeof result);
  return result;
}
template <int lanes>
inline typename Vectors<lanes>::Float load(const uint16_t* values) {
  typename Vectors<lanes>::Half half;
  std::memcpy(&half, values, sizeof half);
  auto bits = __builtin_convertvector(half, typename Vectors<lanes>::Bits) << 16;
  typename Vectors<lanes>::Float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Adds up `lanes` outputs of a group for some tokens.  Several sums take turns where tokens are
// few, because one addition waits for the one before.
template <int tokens, int lanes, typename T, typename I>
void sum_lanes(const float* x, const T* values, const I* inputs, int64_t count, int width, T* y,
               int64_t stride, int64_t used) {
  using Float = typename Vectors<lanes>::Float;
  constexpr int turns = tokens >= 4 ? 1 : 4 / tokens;
  Float sums[turns][tokens] = {};
  int64_t j = 0;
  for (; j + turns <= count; j += turns) {
    for (int turn = 0; turn < turns; ++turn) {
      Float row = load<lanes>(values + (j + turn) * width);
      const float* scales = x + int64_t{inputs[j + turn]} * tokens;
      for (int t = 0; t < tokens; ++t) sums[turn][t] += row * scales[t];
    }
  }
  for (; j < count; ++j) {
    Float row = load<lanes>(values + j * width);
    const float* scales = x + int64_t{inputs[j]} * tokens;
    for (int t = 0; t < tokens; ++t) sums[0][t] += row * scales[t];
  }
  for (int t = 0; t < used; ++t) {
    Float sum = sums[0][t];
    for (int turn = 1; turn < turns; ++turn) sum += sums[turn][t];
    for (int lane = 0; lane < lanes; ++lane) narrow(sum[lane], y + t * stride + lane);
  }
}

// The product of a group with tokens of which `x` has `tokens` at a time, input by input.
template <int tokens, typename T, typename I>
void multiply(const float* x, const T* values, const I* inputs, int64_t count, int width, T* y,
              int64_t stride, int64_t used) {
  if (width % kLanes) {
    sum_lanes<tokens, 8>(x, values, inputs, count, width, y, stride, used);
    return;
  }
  for (int lane = 0; lane < width; lane += kLanes)
    sum_lanes<tokens, kLanes>(x, values + lane, inputs, count, width, y + lane, stride, used);
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

template <int tokens, typename T, typename I>
void product(ffi::ThreadPool pool, const T* x, const T* values, const I* inputs, T* y, int64_t rows,
             int64_t features, int64_t groups, int64_t count, int64_t width) {
  // Tokens in blocks, in each of which the tokens of an input lie together.
  const int64_t blocks = (rows + tokens - 1) / tokens, stride = groups * width;
  auto held = std::make_shared<std::vector<float>>(blocks * tokens * features);
  for (int64_t row = 0; row < rows; ++row) {
    float* block = held->data() + row / tokens * tokens * features + row % tokens;
    for (int64_t i = 0; i < features; ++i) block[i * tokens] = wide(x[row * features + i]);
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t bytes = count * width * sizeof(T);
  // A chunk is worth waking a thread for.
  const int64_t least = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, bytes));
  const int64_t size = std::max(least, (groups + 4 * threads - 1) / (4 * threads));
  auto work = std::make_shared<Work>((groups + size - 1) / size);
  auto chunk = [=](int64_t c) {
    for (int64_t g = c * size; g < std::min(groups, (c + 1) * size); ++g)
      for (int64_t block = 0; block < blocks; ++block)
        multiply<tokens>(held->data() + block * tokens * features, values + g * count * width,
                         inputs + g * count, count, static_cast<int>(width),
                         y + block * tokens * stride + g * width, stride,
                         std::min<int64_t>(tokens, rows - block * tokens));
  };
  for (int64_t t = 1; t < std::min(threads, work->chunks); ++t)
    pool.Schedule([=] { work->run(chunk); });
  work->run(chunk);
  while (work->done.load() < work->chunks) std::this_thread::yield();
}

template <typename T, typename I>
void of_types(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer inputs,
              ffi::Result<ffi::AnyBuffer> y) {
  const int64_t rows = x.dimensions()[0];
  auto run = [&](auto tokens) {
    product<decltype(tokens)::value>(
        pool, static_cast<const T*>(x.untyped_data()),
        static_cast<const T*>(values.untyped_data()),
        static_cast<const I*>(inputs.untyped_data()), static_cast<T*>(y->untyped_data()), rows,
        x.dimensions()[1], values.dimensions()[0], values.dimensions()[1], values.dimensions()[2]);
  };
  if (rows == 1) return run(std::integral_constant<int, 1>());
  if (rows == 2) return run(std::integral_constant<int, 2>());
  if (rows <= 4) return run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, kTokens>());
}

ffi::Error row_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values,
                      ffi::AnyBuffer inputs, ffi::Result<ffi::AnyBuffer> y) {
  const auto index = inputs.element_type(), dtype = x.element_type();
  const bool is_short = index == ffi::DataType::U16;
  if ((!is_short && index != ffi::DataType::S32) || values.element_type() != dtype)
    return ffi::Error::InvalidArgument("row_matmul has no such dtypes");
  if (dtype == ffi::DataType::F32) {
    is_short ? of_types<float, uint16_t>(pool, x, values, inputs, y)
             : of_types<float, int32_t>(pool, x, values, inputs, y);
  } else if (dtype == ffi::DataType::BF16) {
    is_short ? of_types<uint16_t, uint16_t>(pool, x, values, inputs, y)
             : of_types<uint16_t, int32_t>(pool, x, values, inputs, y);
  } else {
    return ffi::Error::InvalidArgument("row_matmul takes float32 and bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparse_dataflow_row_matmul, row_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
