// float32 arithmetic on float32 or bfloat16 memory, written so that the compiler vectorises it.
#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace uni {

using bf16 = c10::BFloat16;

inline float load(const float* p) { return *p; }

inline float load(const bf16* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void store(float* p, float value) { *p = value; }

// Rounds to nearest, ties to even; a NaN stays one.
inline void store(bf16* p, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint16_t half = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  std::memcpy(p, &half, 2);
}

// What memory of type T would hold of `value`.
template <class T>
inline float round_to(float value) {
  T stored;
  store(&stored, value);
  return load(&stored);
}

// exp with a relative error below 3e-7: 2^n times a polynomial of degree 6; 0 below -87, inf above 88.7.
inline float fast_exp(float x) {
  float clipped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  float n = std::nearbyint(clipped * 1.44269504f);
  float r = (clipped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  // in two halves: 2^128 itself is not a float
  int32_t whole = static_cast<int32_t>(n), low = whole >> 1;
  int32_t first = (low + 127) << 23, second = (whole - low + 127) << 23;
  float a, b;
  std::memcpy(&a, &first, 4);
  std::memcpy(&b, &second, 4);
  float value = p * a * b;
  value = x < -87.3f ? 0.f : value;
  value = x > 88.7f ? INFINITY : value;
  return x == x ? value : x;
}

}  // namespace uni
