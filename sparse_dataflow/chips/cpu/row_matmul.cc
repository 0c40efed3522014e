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

#include "kernel.h"

namespace {

// As many vectors of sums are in registers together as hide the latency of an addition.
constexpr int kMostTokens = kLanes == 16 ? 12 : 6;

// `span` neighbouring outputs, in one or two vectors.  `place` says of which output a lane is.
template <int span, typename V>
struct Row {
  static constexpr int lanes = std::min(span, kLanes), vectors = span / lanes;
  // The two vectors of a bfloat16 row have the even and the odd outputs: fewer instructions.
  static constexpr bool in_turns = vectors == 2 && sizeof(V) == 2;
  using Float = typename Vectors<lanes>::Float;

  static void load_to(const V* values, Float* row) {
    if constexpr (in_turns) {
      auto bits = read<typename Vectors<lanes>::Bits>(values);
      row[0] = (Float)(bits << 16);
      row[1] = (Float)(bits & 0xffff0000u);
    } else {
      for (int v = 0; v < vectors; ++v) row[v] = load<lanes>(values + v * lanes);
    }
  }
  static int place(int vector, int lane) {
    return in_turns ? 2 * lane + vector : vector * lanes + lane;
  }
};

// 8 or 16 neighbouring outputs of a group.
struct Strip {
  const char* values;      // Of its first row.
  const uint16_t* inputs;  // Of each row; null for all in order.
  const char* next;        // Values of the strip that is read after this one.
};

constexpr int kLine = 64, kAhead = 2048;  // Bytes of a cache line, and from a read to its prefetch.

// Adds up the outputs of some strips for some tokens, input by input, into y [strips, tokens,
// outputs].  Strips of a single token take turns: one addition waits for the one before, and a
// processor reads several streams faster than one.
template <int tokens, int span, int strips, typename V>
void add_up(const float* x, const Strip* strip, int64_t count, int width, float* y) {
  using R = Row<span, V>;
  typename R::Float sums[strips][tokens][R::vectors] = {};
  const V* values[strips];
  for (int s = 0; s < strips; ++s) values[s] = reinterpret_cast<const V*>(strip[s].values);
  const int64_t row_bytes = width * sizeof(V);
  const int64_t ahead = std::min<int64_t>(count, kAhead / row_bytes);
  const int64_t skipped = std::max<int64_t>(1, kLine / row_bytes) - 1;  // Rows of the same line.
  auto loop = [&](auto input_of) {
    auto rows = [&](int64_t first, int64_t last, auto prefetched) {
      for (int64_t j = first; j < last; ++j) {
        if (tokens == 1 && !(j & skipped))
          for (int s = 0; s < strips; ++s) __builtin_prefetch(prefetched(s) + j * row_bytes);
        for (int s = 0; s < strips; ++s) {
          const float* factors = x + input_of(s, j) * tokens;
          typename R::Float row[R::vectors];
          R::load_to(values[s] + j * width, row);
          for (int t = 0; t < tokens; ++t)
            for (int v = 0; v < R::vectors; ++v) sums[s][t][v] += row[v] * factors[t];
        }
      }
    };
    // The processor's own prefetch ends with each page, and does not know which strip comes next.
    rows(0, count - ahead, [&](int s) { return strip[s].values + ahead * row_bytes; });
    rows(count - ahead, count, [&](int s) { return strip[s].next - (count - ahead) * row_bytes; });
  };
  if (strip[0].inputs) loop([&](int s, int64_t j) { return int64_t{strip[s].inputs[j]}; });
  else loop([](int, int64_t j) { return j; });
  for (int s = 0; s < strips; ++s)
    for (int t = 0; t < tokens; ++t)
      for (int v = 0; v < R::vectors; ++v)
        for (int lane = 0; lane < R::lanes; ++lane)
          y[(s * tokens + t) * span + R::place(v, lane)] = sums[s][t][v][lane];
}

constexpr int kStrips = 4;  // Of a single token that take turns.

using Kernel = void (*)(const float*, const Strip*, int64_t, int, float*);

template <typename V>
Kernel kernel_of(int tokens, int strips, bool is_narrow) {
  if (tokens == 1 && strips == 1) return is_narrow ? add_up<1, 8, 1, V> : add_up<1, 16, 1, V>;
  if (tokens == 1) return is_narrow ? add_up<1, 8, kStrips, V> : add_up<1, 16, kStrips, V>;
  if (tokens == 4) return is_narrow ? add_up<4, 8, 1, V> : add_up<4, 16, 1, V>;
  return is_narrow ? add_up<kMostTokens, 8, 1, V> : add_up<kMostTokens, 16, 1, V>;
}

Kernel kernel_of(XLA_FFI_DataType values, int tokens, int strips, bool is_narrow) {
  if (values == XLA_FFI_DataType_F32) return kernel_of<float>(tokens, strips, is_narrow);
  if (values == XLA_FFI_DataType_BF16) return kernel_of<uint16_t>(tokens, strips, is_narrow);
  if (values == XLA_FFI_DataType_S8) return kernel_of<int8_t>(tokens, strips, is_narrow);
  return nullptr;
}

template <typename T>
void widen(const void* from, int64_t count, float* to, int stride) {
  for (int64_t i = 0; i < count; ++i) to[i * stride] = wide(static_cast<const T*>(from)[i]);
}

template <typename T>
void write(const float* from, const float* scales, int count, void* to) {
  for (int o = 0; o < count; ++o)
    narrow(scales ? from[o] * scales[o] : from[o], static_cast<T*>(to) + o);
}

XLA_FFI_Error* row_matmul(const XLA_FFI_CallFrame* frame) {
  if (frame->args.size != 4 || frame->rets.size != 1)
    return refused(frame->api, "row_matmul has four arguments and a result");
  const XLA_FFI_Buffer x = argument(frame, 0), values = argument(frame, 1);
  const XLA_FFI_Buffer inputs = argument(frame, 2), scales = argument(frame, 3);
  const XLA_FFI_Buffer y = result(frame, 0);
  const int64_t rows = x.dims[0], features = x.dims[1];
  const int64_t groups = values.dims[0], count = values.dims[1], width = values.dims[2];
  const int64_t outputs = groups * width;
  const int tokens = rows == 1 ? 1 : rows <= 8 ? 4 : kMostTokens, span = width % 16 ? 8 : 16;
  const int most_strips = tokens == 1 ? kStrips : 1;
  const Kernel several = kernel_of(values.dtype, tokens, most_strips, span == 8);
  const Kernel single = kernel_of(values.dtype, tokens, 1, span == 8);
  const bool is_float = x.dtype == XLA_FFI_DataType_F32;
  if (!single || !(is_float || x.dtype == XLA_FFI_DataType_BF16) || y.dtype != x.dtype ||
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
  const char* from = static_cast<const char*>(values.data);
  char* to = static_cast<char*>(y.data);
  const auto* index = inputs.dims[0] ? static_cast<const uint16_t*>(inputs.data) : nullptr;
  const auto* factors = scales.dims[0] ? static_cast<const float*>(scales.data) : nullptr;
  auto values_of = [=](int64_t strip) {
    const int64_t output = std::min(strip, strips - 1) * span;
    return from + (output / width * count * width + output % width) * size;
  };
  pool.run((strips + part - 1) / part, [=](int64_t c) {
    float sums[kMostTokens * 16];
    Strip strip[kStrips];
    const int64_t end = std::min(strips, (c + 1) * part);
    for (int64_t first = c * part, taken; first < end; first += taken) {
      taken = first + most_strips <= end ? most_strips : 1;
      for (int64_t s = first; s < first + taken; ++s)
        strip[s - first] = {values_of(s), index ? index + s * span / width * count : nullptr,
                            values_of(s + taken)};
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
  });
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* sparse_dataflow_row_matmul(XLA_FFI_CallFrame* frame) {
  return called(frame, row_matmul);
}
