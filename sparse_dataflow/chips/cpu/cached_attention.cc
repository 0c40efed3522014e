// Attention of new tokens to a cache that they are written to, as an XLA custom call.
//
//   q          [batch, tokens, heads, width], float32 or bfloat16
//   k, v       [batch, tokens, key heads, width], like q
//   keys       [batch, key heads, places, width], like q; the result is in the same memory
//   values     like keys
//   positions  [batch, tokens], int32: the place of each new token; others are not written
//   limits     [2], float32: the tokens that each query sees (0 is all), and the cap of scores (0 is
//              none)
//   y          like q; sums and the softmax are float32
//
// A token is bound by the bytes of the cache, which are read once for all heads that share them.

#include <cmath>

#include "kernel.h"

namespace {

using Float = Vectors<kLanes>::Float;
using Integers = Vectors<kLanes>::Integers;

constexpr float kLeast = -1e30f;  // Score of padding.

// e^x of x <= 0, to float32's precision: 2^n e^r with |r| <= ln(2) / 2, and e^r by its series.
inline Float exponential(Float x) {
  x = x < -87.f ? Float{} - 87.f : x;
  const Float rounder = Float{} + 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number.
  const Float n = (x * 1.44269504f + rounder) - rounder;
  const Float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Float sum = Float{} + 1.f / 5040;
  for (float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f})
    sum = sum * r + factor;
  return sum * (Float)((__builtin_convertvector(n, Integers) + 127) << 23);
}

inline float total(Float x) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

template <typename T>
struct Cache {
  const T *keys, *values;  // Of a key head.
  int64_t width;
};

// The queries of one token that share a key head see the places [first, last).
//   q       [queries, width], scaled
//   scores  [queries, stride] of room, a stride of whole vectors of places
//   y       [queries, width]
template <int queries, typename T>
void attend(const Cache<T>& cache, const float* q, int64_t first, int64_t last, float cap,
            float* scores, int64_t stride, T* y) {
  const int64_t width = cache.width, whole = width / kLanes * kLanes, seen = last - first;
  float largest[queries], sums[queries];
  std::fill_n(largest, queries, kLeast);
  for (int64_t place = first; place < last; ++place) {
    const T* key = cache.keys + place * width;
    Float products[queries] = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Float loaded = load<kLanes>(key + i);
      for (int r = 0; r < queries; ++r) products[r] += loaded * load<kLanes>(q + r * width + i);
    }
    for (int r = 0; r < queries; ++r) {
      float score = total(products[r]);
      for (int64_t i = whole; i < width; ++i) score += wide(key[i]) * q[r * width + i];
      if (cap) score = cap * std::tanh(score / cap);
      scores[r * stride + place - first] = score;
      largest[r] = std::max(largest[r], score);
    }
  }
  for (int r = 0; r < queries; ++r) {
    float* row = scores + r * stride;
    std::fill(row + seen, row + stride, kLeast);
    Float sum = {};
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Float weights = exponential(load<kLanes>(row + i) - largest[r]);
      std::memcpy(row + i, &weights, sizeof weights);
      sum += weights;
    }
    sums[r] = total(sum);
  }
  constexpr int kVectors = 4;  // Of a query's sums that are in registers together.
  for (int64_t begin = 0; begin < whole; begin += kVectors * kLanes) {
    const int vectors = std::min<int64_t>(kVectors, (whole - begin) / kLanes);
    Float weighted[queries][kVectors] = {};
    for (int64_t place = 0; place < seen; ++place) {
      const T* value = cache.values + (first + place) * width + begin;
      for (int v = 0; v < kVectors; ++v) {
        if (v == vectors) break;
        const Float loaded = load<kLanes>(value + v * kLanes);
        for (int r = 0; r < queries; ++r) weighted[r][v] += loaded * scores[r * stride + place];
      }
    }
    for (int r = 0; r < queries; ++r)
      for (int i = 0; i < vectors * kLanes; ++i)
        narrow(weighted[r][i / kLanes][i % kLanes] / sums[r], y + r * width + begin + i);
  }
  for (int r = 0; r < queries; ++r)
    for (int64_t i = whole; i < width; ++i) {
      float weighted = 0;
      for (int64_t place = 0; place < seen; ++place)
        weighted += scores[r * stride + place] * wide(cache.values[(first + place) * width + i]);
      narrow(weighted / sums[r], y + r * width + i);
    }
}

template <typename T>
XLA_FFI_Error* attend_all(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer q = argument(frame, 0), cached = argument(frame, 3);
  const int64_t batch = q.dims[0], tokens = q.dims[1], heads = q.dims[2], width = q.dims[3];
  const int64_t key_heads = cached.dims[1], places = cached.dims[2], group = heads / key_heads;
  const auto* queries = static_cast<const T*>(q.data);
  const auto* positions = static_cast<const int32_t*>(argument(frame, 5).data);
  const auto* limits = static_cast<const float*>(argument(frame, 6).data);
  const int64_t window = limits[0];
  const float cap = limits[1], scale = 1 / std::sqrt(static_cast<float>(width));
  auto* y = static_cast<T*>(result(frame, 0).data);
  T* held[2];
  const T* added[2];
  for (int i = 0; i < 2; ++i) {
    added[i] = static_cast<const T*>(argument(frame, 1 + i).data);
    held[i] = static_cast<T*>(result(frame, 1 + i).data);
    const void* from = argument(frame, 3 + i).data;
    if (from != held[i]) std::memcpy(held[i], from, batch * key_heads * places * width * sizeof(T));
  }
  int64_t longest = 1;
  for (int64_t i = 0; i < batch * tokens; ++i)
    longest = std::min(places, std::max<int64_t>(longest, positions[i] + 1));
  // A chunk of key heads is worth waking a thread for.
  const int64_t bytes = 2 * longest * width * sizeof(T) * tokens, all = batch * key_heads;
  const int64_t part = std::max<int64_t>(1, (1 << 15) / bytes);
  T *keys = held[0], *values = held[1];
  const T *k = added[0], *v = added[1];
  Threads(frame).run((all + part - 1) / part, [=](int64_t c) {
    const int64_t stride = (longest + kLanes - 1) / kLanes * kLanes;
    constexpr int kMost = 4;  // Queries that read a key together.
    std::unique_ptr<float[]> room(new float[kMost * (stride + width)]);
    float *scores = room.get(), *scaled = scores + kMost * stride;
    for (int64_t head = c * part; head < std::min(all, (c + 1) * part); ++head) {
      const int64_t row = head / key_heads, n = head % key_heads;
      const Cache<T> cache{keys + head * places * width, values + head * places * width, width};
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t place = positions[row * tokens + t];
        if (place < 0 || place >= places) continue;
        const int64_t from = ((row * tokens + t) * key_heads + n) * width;
        const int64_t to = (head * places + place) * width;
        std::memcpy(keys + to, k + from, width * sizeof(T));
        std::memcpy(values + to, v + from, width * sizeof(T));
      }
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t place = positions[row * tokens + t], last = std::min(places, place + 1);
        const int64_t first = window ? std::max<int64_t>(0, place + 1 - window) : 0;
        for (int64_t g = 0; g < group; g += kMost) {
          const int64_t at = ((row * tokens + t) * heads + n * group + g) * width;
          const int64_t count = std::min<int64_t>(kMost, group - g);
          if (first >= last) {  // It sees nothing.
            std::fill_n(y + at, count * width, T{});
            continue;
          }
          for (int64_t i = 0; i < count * width; ++i) scaled[i] = wide(queries[at + i]) * scale;
          auto* function = count == 1   ? attend<1, T>
                           : count == 2 ? attend<2, T>
                           : count == 3 ? attend<3, T>
                                        : attend<4, T>;
          const int64_t used = (last - first + kLanes - 1) / kLanes * kLanes;
          function(cache, scaled, first, last, cap, scores, used, y + at);
        }
      }
    }
  });
  return nullptr;
}

XLA_FFI_Error* cached_attention(const XLA_FFI_CallFrame* frame) {
  if (frame->args.size != 7 || frame->rets.size != 3)
    return refused(frame->api, "cached_attention has seven arguments and three results");
  const auto dtype = argument(frame, 0).dtype;
  for (int i = 1; i < 5; ++i)
    if (argument(frame, i).dtype != dtype)
      return refused(frame->api, "cached_attention has arrays of one dtype");
  if (dtype == XLA_FFI_DataType_F32) return attend_all<float>(frame);
  if (dtype == XLA_FFI_DataType_BF16) return attend_all<uint16_t>(frame);
  return refused(frame->api, "cached_attention has no such dtype");
}

}  // namespace

extern "C" XLA_FFI_Error* sparse_dataflow_cached_attention(XLA_FFI_CallFrame* frame) {
  return called(frame, cached_attention);
}
